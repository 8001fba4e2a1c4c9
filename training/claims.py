"""Claims made from sentences of documents: some still supported, some made wrong with one small change.

Only for training: a model that is evaluated on these would be measured with its own yardstick."""

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from random import Random

MONTH = re.compile(r"\b(?:January|February|March|April|May|June|July|August|September|October|November|December)\b")
MONTHS = MONTH.pattern[5:-3].split("|")
# Words of one row can stand for each other.
NUMBER_WORDS = tuple(
    tuple(row.split())
    for row in (
        "two three four five six seven eight nine ten eleven twelve",
        "twenty thirty forty fifty hundred thousand million billion",
        "first second third fourth fifth sixth",
    )
)
OPPOSITES = """
above/below accepted/rejected after/before allow/forbid allowed/forbidden always/never ancient/modern
ascending/descending asynchronous/synchronous began/ended best/worst better/worse bottom/top bought/sold
brother/sister cold/hot common/rare current/former daughter/son day/night decrease/increase decreased/increased
decreases/increases difficult/easy disable/enable disabled/enabled disables/enables domestic/foreign earlier/later
early/late east/west eastern/western excludes/includes excluding/including external/internal failure/success fall/rise
false/true father/mother fell/rose female/male few/most first/last gained/lost good/bad high/low higher/lower
highest/lowest husband/wife illegal/legal impossible/possible inside/outside king/queen large/small larger/smaller
largest/smallest left/right less/more local/remote long/short longest/shortest lose/win lost/won major/minor
majority/minority man/woman maximum/minimum men/women mutable/immutable negative/positive new/old newest/oldest
north/south northern/southern older/younger open/closed oppose/support opposed/supported optional/required peace/war
poor/rich private/public reads/writes start/stop started/stopped strong/weak successful/unsuccessful summer/winter
valid/invalid with/without
"""
PAIRS = re.findall(r"(\w+)/(\w+)", OPPOSITES)
OPPOSITE = dict(PAIRS) | {right: left for left, right in PAIRS}

NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
NUMBER_WORD = re.compile(rf"\b({'|'.join(word for row in NUMBER_WORDS for word in row)})\b", re.IGNORECASE)
YEAR = re.compile(r"1\d{3}|20\d{2}")
# Capitalised words that do not begin the sentence, also several: "Bank of England".
NAME = re.compile(
    r"(?<!^)(?<![.!?] )\b[A-Z][\w'’.-]*[a-z](?: (?:(?:of|the|de|von|van|and) )?[A-Z][\w'’-]*[a-z])*"  # noqa: RUF001
)
OPPOSITE_WORD = re.compile(rf"\b({'|'.join(sorted(OPPOSITE, key=len, reverse=True))})\b", re.IGNORECASE)
AUXILIARIES = "is|are|was|were|has|have|had|can|could|will|would|may|must|should|does|did|do"
AUXILIARY = re.compile(rf"\b(?:{AUXILIARIES})\b(?! not|n't)")
NEGATION = re.compile(rf"(?P<kept>\b(?:{AUXILIARIES})) not\b|\b(?:never|no longer) ")

BRACKETS = re.compile(r" ?\([^()]*\)")
ADVERBIAL = re.compile(
    r"^(?:In|On|At|After|Before|During|By|As of|Since|From|Until|For|While|When|Although|Though|However|Additionally|"
    r"Moreover|Furthermore|Also|Thus|Therefore|Later|Then)\b[^,]{0,60}, "
)
SUBJECT = re.compile(
    r"^(?:It|He|She|They|This|The (?:film|band|album|company|city|book|series|song|show|team|game|school|town|village|"
    r"river|species|group|novel|club|university|actor|singer|player|setting|option|function|method|class|command)) "
)
FILLER = re.compile(
    r"\b(?:also|however|therefore|thus|later|currently|primarily|mainly|originally|approximately|about|very|generally|"
    r"typically),? "
)
MAIN_CLAUSE = re.compile(
    r"(.{45,}?\b(?:is|are|was|were|has|had|became|won|made|took|began|released|founded|born)\b.{15,}?)"
    r"(?:, (?:which|who|and|but|where|while|with|although)\b| and (?:was|is|has|had|became|also)\b|; )"
)
LEAST_CLAIM = 25


def reworded(sentence: str, title: str, rng: Random) -> str:
    """A claim that the sentence supports: itself, or less of it."""
    ways: Sequence[tuple[float, Callable[[str], str]]] = (
        (0.25, lambda text: BRACKETS.sub("", text)),
        (0.20, lambda text: _capitalised(ADVERBIAL.sub("", text))),
        (0.15, lambda text: SUBJECT.sub(lambda _: f"{title} ", text, count=1) if title else text),
        (0.15, _main_clause),
        (0.10, lambda text: text.rstrip(".")),
        (0.15, lambda text: FILLER.sub("", text)),
    )
    claim = sentence.strip()
    for _ in range(rng.choice((0, 1, 1, 2, 2))):
        [way] = rng.choices([way for _, way in ways], [share for share, _ in ways])
        shorter = way(claim)
        if len(shorter) > LEAST_CLAIM:
            claim = shorter
    return claim


def made_wrong(sentence: str, passage: str, elsewhere: str, rng: Random) -> str | None:
    """The sentence with a number, a name or its meaning changed; None if nothing in it can be changed. What replaces
    comes from the passage itself, or from a text that has nothing to do with it."""
    ways: Sequence[tuple[float, Callable[[], str | None]]] = (
        (0.30, lambda: other_number(sentence, passage, rng)),
        (0.25, lambda: other_name(sentence, names(passage if rng.random() < 0.6 else elsewhere), rng)),
        (0.10, lambda: exchanged_names(sentence, rng)),
        (0.20, lambda: negated(sentence, rng)),
        (0.15, lambda: opposite(sentence, rng)),
    )
    for _ in range(3):
        [way] = rng.choices([way for _, way in ways], [share for share, _ in ways])
        wrong = way()
        if wrong and wrong != sentence:
            return wrong
    return None


def other_number(sentence: str, passage: str, rng: Random) -> str | None:
    """With a number, a number word or a month replaced by another."""
    found = [*NUMBER.finditer(sentence), *NUMBER_WORD.finditer(sentence), *MONTH.finditer(sentence)]
    if not found:
        return None
    match = rng.choice(found)
    old = match[0]
    if old in MONTHS:
        new = rng.choice([month for month in MONTHS if month != old])
    elif old[0].isdigit():
        new = _number_near(old, NUMBER.findall(passage), rng)
    else:
        row = next(row for row in NUMBER_WORDS if old.lower() in row)
        new = rng.choice([word for word in row if word != old.lower()])
        new = _capitalised(new) if old[0].isupper() else new
    return _replaced(sentence, match, new)


def _number_near(old: str, passage: Sequence[str], rng: Random) -> str:
    alike = [number for number in passage if number != old and (len(number) == len(old) or rng.random() < 0.2)]
    if alike and rng.random() < 0.5:
        return rng.choice(alike)
    plain = old.replace(",", "")
    if "." in plain:
        digits = len(plain.split(".")[1])
        return f"{float(plain) * rng.choice((0.5, 0.7, 1.3, 2, 10)):.{digits}f}"
    value = int(plain[:15])
    if YEAR.fullmatch(old):
        return str(value + rng.choice((-1, 1)) * rng.choice((1, 2, 3, 4, 5, 7, 10, 12, 20, 30, 100)))
    value = max(
        0, rng.choice((value - 3, value - 1, value + 1, value + 2, value + 5, value + 10, value * 2, value * 10))
    )
    return f"{value:,}" if "," in old else str(value)


def names(text: str) -> list[str]:
    return list(dict.fromkeys(match[0] for match in _names(text)))


def _names(text: str) -> list[re.Match[str]]:
    return [match for match in NAME.finditer(text) if match[0] not in MONTHS]


def other_name(sentence: str, others: Sequence[str], rng: Random) -> str | None:
    found = _names(sentence)
    if not found:
        return None
    match = rng.choice(found)
    known = sentence.lower()
    others = [other for other in others if other.lower() not in known and match[0].lower() not in other.lower()]
    return _replaced(sentence, match, rng.choice(others)) if others else None


def exchanged_names(sentence: str, rng: Random) -> str | None:
    """Who did it and to whom, the other way round. In "Ann and Bob" that would change nothing."""
    found = _names(sentence)
    if len(found) < 2:
        return None
    left, right = sorted(rng.sample(found, 2), key=re.Match.start)
    between = sentence[left.end() : right.start()]
    if left[0] == right[0] or " and " in between or len(between.split()) < 2:
        return None
    return sentence[: left.start()] + right[0] + between + left[0] + sentence[right.end() :]


def negated(sentence: str, rng: Random) -> str | None:
    negation = NEGATION.search(sentence)
    if negation and rng.random() < 0.8:
        return re.sub(" {2,}", " ", _replaced(sentence, negation, negation["kept"] or ""))
    found = list(AUXILIARY.finditer(sentence))
    if not found:
        return None
    match = found[0] if rng.random() < 0.75 else rng.choice(found)
    return _replaced(sentence, match, f"{match[0]} {rng.choice(('not', 'not', 'not', 'never'))}")


def opposite(sentence: str, rng: Random) -> str | None:
    found = list(OPPOSITE_WORD.finditer(sentence))
    if not found:
        return None
    match = rng.choice(found)
    new = OPPOSITE[match[0].lower()]
    return _replaced(sentence, match, _capitalised(new) if match[0][0].isupper() else new)


def differing(right: Sequence[int], wrong: Sequence[int]) -> list[int]:
    """1 for each token of the wrong claim that differs from the right one. Where something is missing, the tokens
    around the gap differ."""
    marks = [0] * len(wrong)
    for kind, _, _, begin, end in SequenceMatcher(None, right, wrong, autojunk=False).get_opcodes():
        if kind != "equal":
            first, last = (max(0, begin - 1), min(len(wrong), begin + 1)) if kind == "delete" else (begin, end)
            marks[first:last] = [1] * (last - first)
    return marks


def _main_clause(text: str) -> str:
    """The front part, up to a subordinate clause, unless "not" is in what is left out."""
    match = MAIN_CLAUSE.match(text)
    if not match or NEGATION.search(text[match.end(1) :]):
        return text
    return match[1].rstrip(" ,;") + "."


def _replaced(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
