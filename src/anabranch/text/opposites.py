"""Directions and quantifiers of a claim for which its evidence has the opposite."""

# ruff: noqa: SIM905  word lists read better as words

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from anabranch.text.negation import is_negating
from anabranch.text.quantities import NUMBER_WORDS
from anabranch.text.reading import ExactDifference, ReadText, TextToken, is_content, root

_UP = """increase more greater higher rise rose risen raise elevate enhance boost grow grew growth larger bigger improve
upregulate climb expand accelerate strengthen stronger intensify widen promote stimulate amplify exceed gain"""
_DOWN = """decrease less fewer lower lessen reduce reduction decline fell fallen drop diminish smaller shrink
downregulate suppress inhibit attenuate weaken weaker impair shorten loss block"""
_TIME = ("before prior previously earlier precede ahead", "after following afterwards subsequently later follow")
# The two sides of a pair, each with its synonyms.
_DIRECTIONS: list[tuple[str, str]] = [
    (_UP, _DOWN),
    _TIME,
    (
        "first initial initially earliest begin began begun start debut beginning",
        "last final finally latest end ended finish conclude",
    ),
    ("enable activate active", "disable deactivate inactive"),
    ("inside within inner internal internally", "outside outer external externally"),
    ("include including contain", "exclude excluding omit except"),
    ("maximum max most highest largest greatest", "minimum min least lowest smallest"),
    ("longer longest long", "shorter shortest short brief"),
    ("faster fastest fast quick quickly rapid rapidly", "slower slowest slow slowly"),
    ("stronger strongest strong strongly", "weaker weakest weak weakly"),
    ("add added addition new introduce", "remove removed delete drop dropped removal"),
    ("success succeed successful successfully", "fail failure failed unsuccessful"),
    ("activate activation activator", "inhibit inhibition inhibitor repress"),
    ("common frequent often", "rare rarely uncommon seldom"),
    ("easy easier simple", "difficult harder hard complex"),
    ("required require mandatory must", "optional optionally"),
    ("north northern northeast northwest", "south southern southeast southwest"),
    *(
        (pair.split("/")[0].replace("+", " "), pair.split("/")[1].replace("+", " "))
        for pair in """
        above+exceed/below true/false left/right top/bottom ascending/descending positive/negative early/late
wide/narrow
        public/private better/worse automatic/manual upstream/downstream parent/child client/server input/output
push/pull
        distal/proximal acute/chronic hot/cold deprecated/recommended global/local relative/absolute many/few
        synchronous/asynchronous lazy/eager explicit/implicit singular/plural advantage/disadvantage agonist/antagonist
        import/export row/column prefix/suffix leading/trailing encode/decode homozygous/heterozygous benign/malignant
        horizontal/vertical large/small rich/poor east+eastern/west+western summer/winter morning/evening
minority/majority
        integer+int/float string+str/bytes
        """.split()
    ),
]
_QUANTIFIERS = [
    (
        "all every each always entirely completely fully whole any both",
        "some sometimes certain occasionally partly partially",
    ),
    ("must mandatory require required", "may optional optionally might"),
    ("always invariably", "usually often sometimes generally typically mostly"),
    ("at-least minimum", "at-most up-to maximum"),
    ("all every everyone entire", "few none"),
    ("most majority mostly", "few minority rarely"),
]
_ONLY = frozenset("only solely exclusively".split())
# A text with one of them may say "only" in other words.
_RESTRICTING = frozenset(
    """
    only sole solely exclusively alone just unique limit limited restrict restricted except unless other but single
    merely one first second until not no never without cannot least none instead must few little specific nothing
    small low endemic minimal default weak weakly brief less
    """.split()
)
_ALWAYS = frozenset("all every always everyone entire entirely never completely".split())
_UNIVERSAL = _ALWAYS | frozenset(
    "any each whole both total complete full fully throughout none no not regardless whenever everything".split()
)
_HEDGES = frozenset(
    """
    some many most several often usually may might certain partly nearly almost sometimes generally typically mostly
    majority mainly frequently commonly normally few
    """.split()
)
WINDOW = 5
# Shared words near by, where a side has many synonyms, and where the evidence also has the claim's own side.
NEED_LOOSE, NEED_BOTH = 1, 3
MAX_PLACES = 40


class _Side(NamedTuple):
    pair: int
    is_second: bool


_PAIRS: list[tuple[Literal["direction", "quantifier"], tuple[str, str]]] = [
    *(("direction", pair) for pair in _DIRECTIONS),
    *(("quantifier", pair) for pair in _QUANTIFIERS),
]
_SIDES: dict[str, list[_Side]] = defaultdict(list)
for _number, (_, _pair) in enumerate(_PAIRS):
    for _second, _words in enumerate(_pair):
        for _stem in sorted({root(_one) for _one in _words.split()}):
            _SIDES[_stem].append(_Side(_number, bool(_second)))
_LOOSE = {
    number
    for number, (kind, (one, other)) in enumerate(_PAIRS)
    if kind == "quantifier" or len(f"{one} {other}".split()) > 4
}
_AFTER_IT = _DIRECTIONS.index(_TIME)


def opposite_findings(claim: ReadText, evidence: ReadText) -> Iterator[ExactDifference]:
    """At most one of each kind."""
    said = _places(claim.tokens)
    if not said:
        return
    shown = _places(evidence.tokens)
    found = set()
    for side, places in said.items():
        other = _Side(side.pair, not side.is_second)
        kind = _PAIRS[side.pair][0]
        if other not in shown or kind in found:
            continue
        for at in places:
            rival = _rival(claim.tokens, at, evidence.tokens, shown, side, is_mixed=other in said)
            if rival is not None:
                found.add(kind)
                yield ExactDifference(kind, claim.tokens[at].raw, evidence.tokens[rival].raw)
                break


def restriction_findings(claim: ReadText, evidence: ReadText) -> Iterator[ExactDifference]:
    """A claim that says "only" where the evidence restricts nothing, or "always" where it says "usually"."""
    if _RESTRICTING.isdisjoint(evidence.words) and "than" not in claim.words:
        for at, token in enumerate(claim.tokens):
            following = claim.tokens[at + 1].low if at + 1 < len(claim.tokens) else ""
            is_denied = at > 0 and is_negating(claim.tokens[at - 1])
            is_amount = following in ("a", "an", "to", "some") or not following.isalpha() or following in NUMBER_WORDS
            if token.raw.lower() in _ONLY and (token.raw.islower() or at == 0) and not is_amount and not is_denied:
                yield ExactDifference("quantifier", token.raw, None)
                return
    claimed = claim.words & _ALWAYS
    if claimed and _UNIVERSAL.isdisjoint(evidence.words) and _HEDGES.isdisjoint(claim.words):
        hedges = evidence.words & _HEDGES
        if hedges:
            yield ExactDifference("quantifier", min(claimed), min(hedges))


def _places(tokens: Sequence[TextToken]) -> dict[_Side, list[int]]:
    places: dict[_Side, list[int]] = {}
    for at, token in enumerate(tokens):
        stem = token.stem
        if token.low in ("least", "most") and at and tokens[at - 1].low == "at":
            stem = f"at-{token.low}"
        elif token.low == "up" and at + 1 < len(tokens) and tokens[at + 1].low == "to":
            stem = "up-to"
        elif token.low == "some" and at + 1 < len(tokens) and tokens[at + 1].low[0].isdigit():
            continue
        for side in _SIDES.get(stem, ()):
            here = places.setdefault(side, [])
            if len(here) < MAX_PLACES:
                here.append(at)
    return places


def _rival(
    said: Sequence[TextToken],
    at: int,
    shown: Sequence[TextToken],
    places: dict[_Side, list[int]],
    side: _Side,
    *,
    is_mixed: bool,
) -> int | None:
    """The opposite word of the evidence that stands near the same words as the claim's word."""
    same = places.get(side, ())
    near = _near(said, at, side)
    scores = [(len(near & _near(shown, place, side)), -place) for place in places[_Side(side.pair, not side.is_second)]]
    best, place = max(scores)
    need = NEED_BOTH if same or is_mixed else NEED_LOOSE if side.pair in _LOOSE else 0
    if best < need or any(len(near & _near(shown, other, side)) >= best - 1 for other in same):
        return None
    return -place if _is_negated(said, at) == _is_negated(shown, -place) else None


def _near(tokens: Sequence[TextToken], at: int, side: _Side) -> set[str]:
    """The stems near a word. What is before or after a thing is told by the words that follow."""
    start = at + 1 if side.pair == _AFTER_IT else max(0, at - WINDOW)
    return {token.stem for token in tokens[start : at + WINDOW + 1] if is_content(token) and token.stem not in _SIDES}


def _is_negated(tokens: Sequence[TextToken], at: int) -> bool:
    return sum(is_negating(token) for token in tokens[max(0, at - WINDOW) : at + WINDOW + 1]) % 2 == 1
