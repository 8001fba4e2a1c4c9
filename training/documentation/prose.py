"""Turns sentences of prose into the questions that they answer."""

# ruff: noqa: RUF001, SIM905  dashes are meant, and word lists read better as words

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from training.documentation.wording import AMBIGUOUS, THIRDS, VERBS, first_person, lower_first, upper_first

# Words that point outside of the sentence, so that a question with them makes no sense alone.
_POINTING = re.compile(
    r"\b(?:this|these|those|it|its|it's|they|them|their|themselves|itself|above|below|following|here|here's|there|such|"
    r"former|latter|previous|previously|next|same|other|others|another|either|also|too|instead|therefore|however|we|"
    r"we'll|we're|our|us|let's|that's|as follows|e\.g|i\.e|etc|first|second|like so|again|then|does so|do so|so|"
    r"otherwise|section|example|examples|chapter|document|page|tutorial|one|ones|both|thing|things|way|ways|see)\b",
    re.IGNORECASE,
)
_OPENING = re.compile(
    r"^(?:However|Also|Additionally|Furthermore|Moreover|Then|Thus|Therefore|Hence|Note that|Note|Please note that|"
    r"In addition|Similarly|Likewise|Finally|Again|Alternatively|Instead|Of course|In this case|In that case|"
    r"For example|For instance|Generally|Typically|"
    r"Usually|Normally|In general|Now|So|And|But|Basically|Specifically|Essentially|As a result),?\s+"
)


class Asked(NamedTuple):
    text: str
    answer: str | None = None


def stands_alone(words: str) -> bool:
    """Whether the words make sense without the text around them."""
    return _POINTING.search(words) is None and not re.search(r"\bthat \w+$", words) and _balanced(words)


def _balanced(words: str) -> bool:
    pairs = all(words.count(left) == words.count(right) for left, right in ("()", "[]", "{}"))
    return pairs and not words.count('"') % 2 and "``" not in words and "::" not in words and "..." not in words


_CLAUSE_END = re.compile(
    r" \(| Defaults? |; | -- | — | – |,? but |: |"
    r", (?:which|such as|e\.g|for example|i\.e|so|as|and then|since|because|unless)\b"
)


def clause(words: str, most: int = 16) -> str | None:
    """The words up to where a sentence may be cut, if that is short enough."""
    words = _CLAUSE_END.split(words)[0].strip().rstrip(".,:;!")
    if re.search(r", or\b|, and\b", words) and words.count(",") == 1 and len(words.split(", ")[0].split()) < 5:
        return None
    if len(words.split()) > most and ", " in words:
        words = words[: words.rindex(", ")]
    return words if 2 <= len(words.split()) <= most else None


_SUBJECT = r"(?P<s>(?:(?:The|A|An|Each|Every|All|Most) )?[\w.@'/-]+(?:\(\))?(?: [\w.@'/-]+(?:\(\))?){0,4}?)"
_YOU = r"(?P<s>You|" + _SUBJECT.removeprefix("(?P<s>")
_AUXILIARY = r"(?P<aux>is|are|was|can|may|must|should|will|cannot|can't|won't|isn't|aren't|shouldn't|mustn't)"
_NEGATIVE = {"cannot": "can", "can't": "can", "won't": "will", "isn't": "is", "aren't": "are", "shouldn't": "should"}
_NO_SUBJECT = frozenset(
    """when if while because since although to by in on for with as after before from whether once where unless using
    note see default example what which who why how that but or and not only even just both some many any no several
    be being without until during now still""".split()
)


def _subject(words: str) -> str | None:
    """The subject as the middle of a question; None if it does not look like one."""
    tokens = words.split()
    if not tokens or any(token.lower() in _NO_SUBJECT for token in tokens) or not stands_alone(words):
        return None
    if (tokens[0].lower() in VERBS and tokens[0].lower() not in AMBIGUOUS) or any(
        token in THIRDS and token.endswith("es") for token in tokens[1:]
    ):
        return None
    if any(re.fullmatch(r"is|are|was|were|has|have|can|will|may|must|should|do|does", token) for token in tokens):
        return None
    return first_person(lower_first(words))


def what_is(sentence: str, random: Random) -> Iterator[Asked]:
    """X is a Y."""
    found = re.match(
        _SUBJECT + r" (?P<aux>is|are) (?P<o>(?:an?|the|one of|used|designed|responsible|essentially|simply) .+)",
        sentence,
    )
    if found is None or (subject := _subject(found["s"])) is None or len(subject.split()) > 5:
        return
    aux = found["aux"]
    if re.match(r"(?:used|designed) (?:to|for)", found["o"]):
        yield Asked(f"What {aux} {subject} {random.choice(('for', 'used for', 'good for'))}?")
        did = clause(re.sub(r"^(?:used|designed) (?:to|for) ", "", found["o"]))
        if did and stands_alone(did) and did.split()[0] in VERBS:
            yield Asked(f"What is used to {first_person(did)}?", found["s"])
    elif not re.match(r"(?:the|one of|a) (?:best|only|most|case|following|good|bad|bit|lot|recommended)", found["o"]):
        yield Asked(
            random.choice((f"What {aux} {subject}?", f"what exactly {aux} {subject}", f"Explain what {subject} {aux}"))
        )


_HAPPENS = ("What happens if", "What happens when", "What if", "what happens if", "What is the effect if")
_ADVICE = ("What should I do if", "What to do if", "What can I do if", "What if")


def _has_verb(condition: str) -> bool:
    words = condition.split()[1:]
    return any(word in _VERBS or word in THIRDS or word.endswith(("n't", "ed")) for word in words)


_VERBS = frozenset(
    "is are was were has have had does do did can cannot could will would should must may exists".split()
)


def what_if(sentence: str, random: Random) -> Iterator[Asked]:
    """If A, B. When A, B."""
    found = re.match(r"(?:If|When|Whenever) (?P<a>[^,]{6,110}), (?:then )?(?P<b>.{8,})", sentence)
    if found is None or not stands_alone(found["a"]) or len(found["a"].split()) < 3 or re.match(r"\w+ing ", found["a"]):
        return
    condition = found["a"]
    if wanted := re.match(
        r"you (?:want|need|wish|would like|'d like|have) to (?P<v>\w+ .+)|you'd like to (?P<w>\w+ .+)", condition
    ):
        phrase = wanted["v"] or wanted["w"]
        if phrase.split()[0] in VERBS:
            yield from how_to(phrase, random)
        return
    if re.search(r"\b(?:not )?possible|necessary|desired|needed|supported\b", condition) or condition.startswith(
        "you don't"
    ):
        return
    if re.match(r"(?:\w+ed|set|True|False|None|not|no longer|only|run|given|present) ", condition) or "(" in condition:
        return
    advice = re.match(
        r"(?:you should|you must|you can|you may|you need|you'll|make sure|be sure|use|set|see|try|consider)\b",
        found["b"],
    )
    yours = condition.startswith("you")
    if not yours and not _has_verb(condition):
        return
    starts = _ADVICE if advice and yours else _HAPPENS[:4] if yours else _HAPPENS
    yield Asked(f"{random.choice(starts)} {first_person(condition)}?")


_HOW = (
    *("How do I {}?", "How do I {}?", "How can I {}?", "How to {}?", "how to {}", "What is the way to {}?"),
    *("How would I {}?", "I want to {}. How?", "Is there a way to {}?", "how do you {}", "What do I need to do to {}?"),
    *("How does one {}?", "{}", "What should I do to {}?"),
)


def how_to(phrase: str, random: Random) -> Iterator[Asked]:
    """How to do what the phrase says, if it stands alone."""
    said = clause(first_person(phrase), most=14)
    if said is None or len(said.split()) < 3 or not stands_alone(said) or re.search(r"\b(?:you|by|with|using)$", said):
        return
    yield Asked(random.choice(_HOW).format(said))


_TO_DO = re.compile(r"(?:In order t|T)o (?P<v>\w+ [^,]{5,90}), \w.{6,}")
_USE = re.compile(
    r"(?:You can|You may|You should|You could|You'll want to|You need to)?\s*[Uu]se "
    r"(?P<o>(?:the )?[\w.`()@-]+(?: [\w.()@-]+){0,4}?) (?:in order )?to (?P<v>\w+ .{5,})"
)
_BY_MEANS = re.compile(r"You can (?:also |easily |then |always )?(?P<v>\w+ .{6,}?) (?:by|using|with|via|through) \w.+")


def purpose(sentence: str, random: Random) -> Iterator[Asked]:
    """To do A, do B. Use B to do A. You can do A with B."""
    found = _TO_DO.match(sentence) or _USE.match(sentence) or _BY_MEANS.match(sentence)
    if found is None or found["v"].split()[0] not in VERBS or (found.re is _BY_MEANS and found["v"].startswith("use ")):
        return
    said = clause(first_person(found["v"]), 14)
    if found.re is _USE and random.random() < 0.3 and said and stands_alone(said) and stands_alone(found["o"]):
        yield Asked(random.choice(("What can I use to {}?", "What should I use to {}?")).format(said), found["o"])
    else:
        yield from how_to(found["v"], random)


def allows(sentence: str, random: Random) -> Iterator[Asked]:
    """X allows you to do A."""
    found = re.match(
        _SUBJECT + r" (?:allows?|lets?|enables?) (?:you|users|developers)(?: to)? (?P<v>\w+ .{6,})", sentence
    )
    if found is None or (subject := _subject(found["s"])) is None or found["v"].split()[0] not in VERBS:
        return
    if random.random() < 0.5:
        yield Asked(
            random.choice(("What does {} allow me to do?", "What can I do with {}?", "What is {} for?")).format(subject)
        )
    elif (said := clause(first_person(found["v"]), 13)) and stands_alone(said):
        forms = ("What allows me to {}?", "What lets me {}?", "How can I {}?")
        yield Asked(random.choice(forms).format(said), found["s"])


def yes_or_no(sentence: str, random: Random) -> Iterator[Asked]:
    """X can, must, should, cannot, is not …"""
    found = re.match(
        _YOU + r" (?P<aux>can|may|must|should|cannot|can't|shouldn't)(?: only| not)? (?P<v>.{6,})", sentence
    )
    if found is None:
        return
    subject = "I" if found["s"] == "You" else _subject(found["s"])
    said = clause(first_person(found["v"]), 12)
    if subject is None or said is None or not stands_alone(said) or said.split()[0] in ("not", "be sure", "note"):
        return
    aux = _NEGATIVE.get(found["aux"], found["aux"].split()[0])
    if re.match(r"(?:also|always|easily|never|simply|usually|often|still|probably|now|even|just|then)\b", said):
        said = said.split(" ", 1)[1]
    if aux == "must":
        forms = ["Must {s} {v}?", "Does {s} have to {v}?" if subject != "I" else "Do I have to {v}?"]
        if subject.split()[-1].endswith("s") and subject != "I":
            forms = ["Must {s} {v}?", "Do {s} have to {v}?"]
    else:
        forms = [f"{aux.capitalize()} {{s}} {{v}}?"]
        if aux == "can" and subject == "I":
            forms += ["Is it possible to {v}?", "Can you {v}?", "Am I able to {v}?"]
    yield Asked(random.choice(forms).format(s=subject, v=said))


def why(sentence: str, _: Random) -> Iterator[Asked]:
    """A because B; A so that B."""
    found = re.match(
        r"(?P<a>.{12,120}?),? (?P<link>because|since|so that|in order to) (?P<b>(?!version|Django|\d|of\b)\w.{8,})",
        sentence,
    )
    if found is None or not stands_alone(found["a"]):
        return
    if "so that" in found["link"] and re.search(r"n't|\bnot\b", found["a"]):
        return
    split = re.match(_YOU + r" " + _AUXILIARY + r" (?P<v>.{4,})", found["a"])
    if split is None:
        return
    subject = "I" if split["s"] == "You" else _subject(split["s"])
    said = clause(first_person(split["v"]), 14)
    if subject is None or said is None:
        return
    aux, negative = (_NEGATIVE[split["aux"]], "not ") if split["aux"] in _NEGATIVE else (split["aux"], "")
    if subject == "I" and aux in ("is", "are"):
        return
    yield Asked(f"Why {aux} {subject} {negative}{said}?", found["b"].rstrip("."))


_DOES = re.compile(
    _SUBJECT + r" (?:will )?(?P<v>returns|raises|requires|accepts|takes|contains|represents|provides|generates|expects|"
    r"supports|emits|stores|produces|defines) (?P<o>.{6,})"
)


def what_does(sentence: str, random: Random) -> Iterator[Asked]:
    """X returns, raises, requires, supports … Y."""
    found = _DOES.match(sentence)
    if found is None or (subject := _subject(found["s"])) is None:
        return
    base = THIRDS.get(found["v"]) or {"takes": "take", "expects": "expect"}.get(found["v"], found["v"])
    when = re.match(
        r"(?P<e>an? [\w.]+|[\w.]+(?:Error|Exception|Exist|Found|Denied)\w*)(?: exception| error)? (?:if|when) .+",
        found["o"],
    )
    if base == "raise" and when:
        yield Asked(
            random.choice(("When does {s} raise {e}?", "Why does {s} raise {e}?", "{s} raises {e}")).format(
                s=subject, e=when["e"]
            )
        )
    else:
        yield Asked(f"What does {subject} {base}?", clause(found["o"], 12))


def by_default(sentence: str, random: Random) -> Iterator[Asked]:
    """By default, X does Y. X is Y by default."""
    found = re.match(
        r"By default,? (?P<s>[\w.()'-]+(?: [\w.()'-]+){0,5}?) (?P<v>is|are|will|can|has|have|\w+s) (?P<o>.{4,})",
        sentence,
    )
    if found is None or (subject := _subject(found["s"])) is None:
        return
    said = clause(first_person(found["o"]), 12)
    if said is None or not stands_alone(said):
        return
    verb = found["v"]
    if verb in ("is", "are", "will", "can"):
        yield Asked(f"{verb.capitalize()} {subject} {said} by default?")
        if verb in ("is", "are") and re.match(r"\w+ed\b", said):
            yield Asked(f"How {verb} {subject} {said.split()[0]} by default?")
    elif verb in THIRDS:
        yield Asked(
            random.choice(
                (f"Does {subject} {THIRDS[verb]} {said} by default?", f"What does {subject} {THIRDS[verb]} by default?")
            )
        )


_RULES: Sequence[Callable[[str, Random], Iterator[Asked]]] = (
    *(what_if, purpose, why, by_default, allows, what_is, what_does, yes_or_no),
)


def asked(sentence: str, random: Random) -> list[Asked]:
    """The questions that a sentence answers; at most one rule applies."""
    if (
        not 30 < len(sentence) < 420
        or not sentence[0].isalpha()
        or sentence.endswith((":", "?"))
        or not _balanced(sentence)
    ):
        return []
    opening = _OPENING.match(sentence)
    bare = upper_first(sentence[opening.end() :]) if opening else sentence
    for rule in _RULES:
        if found := [each for each in rule(bare, random) if reads_well(each.text)]:
            return found
    return []


_UGLY = re.compile(
    r"\b(?:a|an|the|of|to|for|with|in|and|or|by|that|is|are|on|at|from|as|if|not|be|via|into)[?.]?$|"
    r"[{}<>|\\=]{2,}|\s[,.]|\b(\w+) \1\b|\bI is\b|\bnor\b|%\(|\b[Mm]ay I have\b"
)


def reads_well(question: str) -> bool:
    """Whether a question is of ordinary length and does not end or repeat itself in the middle of a phrase."""
    return 3 <= len(question.split()) <= 24 and _UGLY.search(question) is None
