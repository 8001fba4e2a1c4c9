"""Statements that a claim negates and its evidence affirms, or the reverse."""

# ruff: noqa: SIM905  word lists read better as words

from collections.abc import Iterator, Sequence
from functools import lru_cache

from anabranch.text.reading import ExactDifference, ReadText, TextToken, ends_clause, is_content, root

_NOT = frozenset("not no never cannot neither nor none nobody nothing without nowhere".split())
_NEGATING = _NOT | frozenset("unlike fail fails failed prevent prevents avoid avoids stop stops instead rather".split())
_VERBAL = frozenset("not never cannot".split())
# They deny as well: a text with one of them may say the same as one with "not".
_DENIALS = """
lack fail failure unable refuse deny absent absence miss omit drop remove ignore skip exclude prevent avoid stop
cease unlike
instead rather hardly scarcely rarely seldom barely loss lose lost reject unless except forbid prohibit disable gone
disappear
null non false empty invalid abolish eliminate abandon negative less unknown rid ban independent otherwise optional
deficient defect
""".split()
_DENYING = frozenset(_DENIALS) | frozenset(map(root, _DENIALS))
# Words that a writer may turn into a negation: "the first" is "never before".
_LIMITS = """
only free first little few fewer deprecate leave left but despite although yet however nonetheless zero error wrong
against
block debut alone restrict limit out remain still until rule decline beyond too sufficient most whereas contrast just
merely
end before away closed withdraw withdrawal always prompt
avoid resistant resistance max maximum automatically automatic addition largest
""".split()
_LIMITING = frozenset(_LIMITS) | frozenset(map(root, _LIMITS))
_CONDITIONS = frozenset("if when unless where whether while once until with for".split())
_NOT_WHOLLY = frozenset("only just merely until necessarily yet".split())
_PREFIXES = ("non", "dis", "un", "in", "im", "ir", "il")
_IN = frozenset(
    "dependent valid complete correct active effective visible secure compatible possible mutable proper perfect "
    "regular responsive accurate adequate appropriate capable consistent direct finite formal sufficient sensitive "
    "significant".split()
)
_UN = frozenset(
    "under until unit united unique union understand universe university unless distance district discuss".split()
)
SCOPE = 6
BEFORE, AFTER = 8, 6
MAX_CUES = 40


def negation_findings(claim: ReadText, evidence: ReadText) -> Iterator[ExactDifference]:
    """At most one."""
    ours, theirs = _cues(claim.tokens), _cues(evidence.tokens)
    said, shown = _denials(claim.tokens), _denials(evidence.tokens)
    # "No river is longer than it" is no denial of "it is the longest".
    is_comparison = "than" in claim.words or ours[:1] == [0]
    if ours and not theirs and not shown and not _is_limited(evidence) and not is_comparison:
        yield ExactDifference("negation", claim.tokens[ours[0]].raw, None)
        return
    for at in ours:
        if _affirms(evidence.tokens, claim.tokens, at, [*theirs, *shown]):
            yield ExactDifference("negation", claim.tokens[at].raw, None)
            return
    if not ours and not said and "only" not in claim.words:
        for at in theirs:
            if _affirms(claim.tokens, evidence.tokens, at, []):
                yield ExactDifference("negation", "", evidence.tokens[at].raw)
                return
    yield from _prefixes(claim, evidence, is_denied=bool(theirs))
    for found in _prefixes(evidence, claim, is_denied=bool(ours)):
        yield ExactDifference("negation", found.found or "", found.claimed)


def is_negating(token: TextToken) -> bool:
    return token.stem == "n't" or token.low in _NEGATING


def _cues(tokens: Sequence[TextToken]) -> list[int]:
    """The places of the words that negate what follows them; not those of "No, ..." and "not only"."""
    cues = []
    for at, token in enumerate(tokens):
        if (token.stem == "n't" or token.low in _NOT) and token.raw != "None":
            after = tokens[at + 1].low if at + 1 < len(tokens) else ""
            is_answer = token.low == "no" and (after == "." or (at == 0 and after == ","))
            if after not in _NOT_WHOLLY and not is_answer:
                cues.append(at)
    return cues[:MAX_CUES]


def _denials(tokens: Sequence[TextToken]) -> list[int]:
    """The places of the other words that deny something."""
    return [at for at, token in enumerate(tokens) if token.raw == "None" or _denies(token.low, token.stem)]


@lru_cache(maxsize=20_000)
def _denies(low: str, stem: str) -> bool:
    if low in _DENYING or stem in _DENYING:
        return True
    if len(low) <= 5 or low in _UN:
        return False
    return (
        low.startswith(("un", "non", "dis", "mis"))
        or low.endswith("less")
        or (low[:2] in ("in", "im", "ir") and low[2:] in _IN)
    )


def _is_limited(reading: ReadText) -> bool:
    return not (_LIMITING.isdisjoint(reading.words) and _LIMITING.isdisjoint(reading.stems))


def _affirms(tokens: Sequence[TextToken], negating: Sequence[TextToken], at: int, denials: Sequence[int]) -> bool:
    """Whether a text states, without any denial near by, what the other one negates at this place."""
    if not _negates_verb(negating, at) or _is_conditional(negating, at):
        return False
    scope = _scope(negating, at)
    if not scope:
        return False
    places = [place for place, token in enumerate(tokens) if token.stem == scope[0]][:MAX_CUES]
    rest = frozenset(scope[1:3])
    if rest:
        places = [p for p in places if any(token.stem in rest for token in tokens[max(0, p - SCOPE) : p + SCOPE + 1])]
    return bool(places) and not any(p - BEFORE <= denial <= p + AFTER for p in places for denial in denials)


def _negates_verb(tokens: Sequence[TextToken], at: int) -> bool:
    token = tokens[at]
    if token.low == "no":
        return at + 1 < len(tokens) and tokens[at + 1].low == "longer"
    return token.low in _VERBAL or token.stem == "n't"


def _is_conditional(tokens: Sequence[TextToken], at: int) -> bool:
    """Whether the negation belongs to a condition, or denies a part: "but not by train"."""
    if at and tokens[at].low == "not" and tokens[at - 1].low in ("or", ",", "but", "and"):
        return True
    for token in reversed(tokens[max(0, at - 7) : at]):
        if ends_clause(token) or token.raw == ",":
            return False
        if token.low in _CONDITIONS:
            return True
    return False


def _scope(tokens: Sequence[TextToken], at: int) -> list[str]:
    scope = []
    for token in tokens[at + 1 : at + 1 + SCOPE]:
        if ends_clause(token):
            break
        if is_content(token):
            scope.append(token.stem)
    return scope


def _prefixes(one: ReadText, other: ReadText, *, is_denied: bool) -> Iterator[ExactDifference]:
    """A word such as "unlikely" where the other text has "likely", and no negation that makes up for it."""
    if is_denied:
        return
    for token in one.tokens:
        if len(token.low) <= 6 or not token.low.startswith(_PREFIXES):
            continue
        prefix = next(p for p in _PREFIXES if token.low.startswith(p))
        if prefix[0] == "i" and token.low[len(prefix) :] not in _IN:
            continue
        bare = root(token.low[len(prefix) :])
        if len(bare) > 4 and bare in other.stems and bare not in one.stems and token.stem not in other.stems:
            yield ExactDifference("negation", token.raw, bare)
            return
