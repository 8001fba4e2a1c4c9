"""Whether two sentences say different things about the same: they differ in one number, date, name or negation, and in
nothing else that could make them speak of different things."""

# ruff: noqa: SIM905  word lists read better as words

import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from anabranch.domain.model import ConflictKind
from anabranch.text.exact_checks import differences
from anabranch.text.reading import ExactDifference, ReadText, TextToken, is_content, root

# The share of the words of the shorter sentence that the other has too.
ALIKE = 0.5
# A sentence with fewer words that both have is about too little.
LEAST_SHARED = 2
# Words of the question that both must have if they share no name with it.
LEAST_ASKED = 2
MAX_SENTENCE, MAX_ABOVE = 400, 300

QUANTITIES = frozenset(["number", "unit", "date"])
# What restricts the sentence that it stands in: with it, both may be right.
RESTRICTING = frozenset(
    """
    for if when whenever where unless except only with without on under until till while provided during as since from
    through via using among between inside outside per than or
    """.split()
)
# Also anywhere in the sentence.
QUALIFYING = frozenset(
    """
    if when whenever unless until till except only without while other another own some certain sometimes usually most
    least also too either neither originally previously formerly planned
    """.split()
)
# Words that change nothing about what is said.
NEUTRAL = frozenset(
    root(word)
    for word in """
    number amount total rate value people person town city called named known located currently now use used
    """.split()
)
# What documents are called.
DOCUMENTS = frozenset(
    root(word)
    for word in """
    agenda api article book brochure catalogue changelog chapter checklist conditions configuration contract
    documentation documents faq form guide guidelines handbook help history hr index info information installation
    instructions introduction knowledge leaflet letter list manual memo minutes notes overview page policy policies
    procedure procedures process questions readme reference regulations report review rules settings setup sheet summary
    support terms troubleshooting tutorial update wiki calendar dates md txt html pdf rst docx
    """.split()
)
# Words of questions that an answer need not have; DATING if it is a date.
ASKING = frozenset(root(word) for word in "many long often exactly currently".split())
UNSAID = ASKING | NEUTRAL | frozenset(root(word) for word in "far please tell know say".split())
DATING = frozenset(root(word) for word in "year date day month century".split())
# The units of numbers that answer "how long" and so on, unless they stand with that word.
TIME = re.compile(r"(?:minute|hour|day|week|month|year|decade)s?", re.IGNORECASE)
HOW = {
    "long": re.compile(rf"(?:milli)?seconds?|{TIME.pattern}", re.IGNORECASE),
    "often": re.compile(rf"times|seconds?|{TIME.pattern}", re.IGNORECASE),
    "far": re.compile(r"k?m|(?:kilo)?met(?:re|er)s?|miles?|feet|yards?", re.IGNORECASE),
    "much": re.compile(r"[$\u20ac\u00a3\u00a5]|dollars?|euros?|pounds?|cents?|USD|EUR|GBP", re.IGNORECASE),
}
ASKS_HOW = re.compile(r"\bhow (long|often|far|much(?= (?:is|are|was|were)\b))\b", re.IGNORECASE)
# With nothing but a name behind it, this asks what something is, and no number or name says that.
ASKS_WHAT = re.compile(r"\b(?:what|who)(?:'s|\s+(?:is|are|was|were))\b", re.IGNORECASE)
# The kind of name that is asked for: "which team", "what programming language is".
KIND = re.compile(
    r"\b(?:what|which)\s+(?:((?:[\w-]+\s+){1,3}?)(?:is|are|was|were|do|does|did|has|have|can|will)\b|([\w-]+))",
    re.IGNORECASE,
)
# What makes a noun of a verb: invent, inventor; or nothing.
ENDINGS = frozenset(["", "er", "or", "r", "ion", "ation", "ment"])
# A number behind these words says which one is meant, not what is said of it.
NUMBERED = frozenset(
    """
    version versions release releases v ver edition chapter section part figure table step example level phase series
    season episode round volume class type grade model generation python java
    """.split()
)
# What stands before a name that is the only one.
BE = frozenset(["is", "are", "was", "were"])
PLACES = frozenset(["in", "at", "on"])
LEADING = BE | PLACES | frozenset(["by", "called", "named"])
HAVE = frozenset(["has", "have", "had"])
ARTICLES = frozenset(["the", "a", "an"])
# With these verbs, two names can both be right.
SEVERAL = frozenset(
    root(word) for word in "support include provide offer contain accept allow feature star play like example".split()
)
ASKS_DATE = re.compile(
    r"\b(?:when|year|date|day|month|time|deadline|since|until|long|old|due|century)\b", re.IGNORECASE
)
# These ask for a date, and nothing else.
ASKS_DATE_ONLY = re.compile(r"\s*(?:when\b|(?:in |on )?(?:what|which) (?:year|date|day|month)\b)", re.IGNORECASE)
ASKS_NOW = re.compile(r"\s*when (?:do|does)\b", re.IGNORECASE)
# What is counted; it stands near the number.
COUNTED = re.compile(r"\bhow many\s+((?:[\w'-]+\s*){1,3})", re.IGNORECASE)
NEAR = 5
ASKS = re.compile(r"\b(?:who|whose|whom|what|which|where|when|why|how)\b", re.IGNORECASE)
# The first of these words in a question, with what it does not ask for.
NOT_ASKED: dict[ConflictKind, frozenset[str]] = {
    "number": frozenset(["who", "whose", "whom", "where", "why"]),
    "date": frozenset(["who", "whose", "whom", "where", "why"]),
    "name": frozenset(["when", "why", "how"]),
    "negation": frozenset(["who", "whose", "whom", "where", "when"]),
    "other": frozenset(["who", "whose", "whom", "where", "when"]),
}
# Nouns and adjectives that say the same of a number.
MEASURES = {
    root(noun): root(adjective)
    for noun, adjective in (
        ("length", "long"), ("depth", "deep"), ("height", "tall"), ("high", "tall"), ("width", "wide"), ("age", "old"),
        ("weight", "weigh"), ("price", "cost"), ("employee", "employ"),
    )
}  # fmt: skip
# Forms of a verb that have different stems, and nouns that say the same.
FORMS = {
    root(form): root(forms.split()[0])
    for forms in (
        "become became", "begin began begun start", "bear born birth", "build built", "buy bought",
        "choose chose chosen", "die died death", "draw drew drawn", "give gave given", "grow grew grown", "hold held",
        "lead led", "lose lost", "make made", "meet met", "pay paid", "rise rose risen", "run ran", "sell sold",
        "send sent", "speak spoke spoken", "spend spent", "take took taken", "teach taught", "win won winner",
        "write wrote written",
    )
    for form in forms.split()
}  # fmt: skip
NAMELIKE = re.compile(r"[^\W\d_A-Z]*[A-Z\d][\w.-]*")
WORD = re.compile(r"[\w.-]+")


class Stated(NamedTuple):
    """A sentence, its document's title, the heading above it, and the term or the list that it belongs to."""

    text: str
    title: str = ""
    heading: str = ""
    subject: str = ""


class Disagreement(NamedTuple):
    """`fuller`: the first sentence says more than the second."""

    kind: ConflictKind
    fuller: bool


class ReadStatement:
    """A sentence with its words."""

    def __init__(self, stated: Stated) -> None:
        self.text = stated.text[:MAX_SENTENCE]
        self.title, self.heading, self.subject = (part[:MAX_ABOVE] for part in stated[1:])
        self.above = f"{self.title}\n{self.heading}\n{self.subject}"
        self.reading = ReadText(self.text)

    @cached_property
    def tokens(self) -> list[TextToken]:
        return self.reading.tokens

    @cached_property
    def words(self) -> frozenset[str]:
        return _content(self.reading)

    @cached_property
    def above_words(self) -> frozenset[str]:
        return _content(ReadText(self.above))

    @cached_property
    def above_numbers(self) -> frozenset[str]:
        return frozenset(word for word in WORD.findall(self.above.lower()) if any(map(str.isdigit, word)))

    @cached_property
    def heading_words(self) -> frozenset[str]:
        return _content(ReadText(self.heading))

    @cached_property
    def subject_words(self) -> frozenset[str]:
        return _content(ReadText(self.subject))

    @cached_property
    def names(self) -> frozenset[str]:
        """Words that begin with a capital letter or have a digit, except the first one."""
        return frozenset(
            token.stem for token in self.tokens[1:] if is_content(token) and NAMELIKE.fullmatch(token.raw) is not None
        )


def disagreement(asked: ReadStatement, one: ReadStatement, other: ReadStatement) -> Disagreement | None:
    """How two sentences differ in what is asked; None if they agree, or may speak of different things."""
    question = asked.text
    shared = one.words & other.words
    if len(shared) < LEAST_SHARED or len(shared) < ALIKE * min(len(one.words), len(other.words)):
        return None
    if not _is_of_one_thing(asked, one, other):
        return None
    found, back = differences(one.text, other.text), differences(other.text, one.text)
    kind = _kind(found, back)
    if kind is None or not _is_asked(question, kind):
        return None
    slots = _Slots(one, found), _Slots(other, back)
    if not all(slot.is_one and not slot.is_numbered(question) for slot in slots):
        return None
    if not _says_all(asked, kind, one, other) or not all(slot.is_asked(asked, kind) for slot in slots):
        return None
    if kind == "name" and (SEVERAL & (one.words | other.words) or not all(slot.is_only_name for slot in slots)):
        return None
    more = _more(one, other, slots[0]), _more(other, one, slots[1])
    if None in more or all(more):
        return None
    return Disagreement(kind, fuller=bool(more[0]))


def _kind(found: Sequence[ExactDifference], back: Sequence[ExactDifference]) -> ConflictKind | None:
    """The kind of difference that both have; None if there are several."""
    kinds, others = {one.kind for one in found}, {one.kind for one in back}
    if not kinds or not others:
        return None
    if "unit" in kinds | others and len(kinds | others) > 1:
        return None
    if kinds | others <= QUANTITIES:
        return "date" if "date" in kinds & others else "number"
    if kinds | others <= {"direction", "quantifier"}:
        return "other"
    if kinds == others == {"name"}:
        return "name"
    return "negation" if kinds == others == {"negation"} else None


def _is_asked(question: str, kind: ConflictKind) -> bool:
    first = ASKS.search(question)
    if first is not None and first[0].lower() in NOT_ASKED[kind]:
        return False
    if kind == "name":
        return first is not None
    return kind != "date" or ASKS_DATE.search(question) is not None


def _is_of_one_thing(asked: ReadStatement, one: ReadStatement, other: ReadStatement) -> bool:
    """Whether both are about what is asked. Numbers in titles and headings, and names in titles, are those of different
    things; so are different headings, unless the sentences themselves have a name that the question has."""
    if not all(asked.names <= side.words | side.above_words for side in (one, other)):
        return False
    if one.above_numbers != other.above_numbers or one.subject_words != other.subject_words:
        return False
    both = one.words & other.words
    if asked.names & both:
        return True
    known = both | asked.words | NEUTRAL | DOCUMENTS
    if len(asked.words & both) < LEAST_ASKED or not all(_without_name(side.title, known) for side in (one, other)):
        return False
    # If neither title is about what is asked, they may be what the sentences are about.
    if not any(_content(ReadText(side.title)) <= known for side in (one, other)):
        return False
    # A long question whose words both have says by itself what they are about.
    if asked.words <= both | ASKING and len(asked.words & both) > LEAST_ASKED:
        return not (one.heading_words and other.heading_words) or bool(one.heading_words & other.heading_words)
    return one.heading_words == other.heading_words or one.heading_words | other.heading_words <= known


def _says_all(asked: ReadStatement, kind: ConflictKind, one: ReadStatement, other: ReadStatement) -> bool:
    """Whether both say, or their titles and headings do, all that the question has: that they have the name of its
    subject is not enough."""
    wanted = asked.words - UNSAID
    if kind == "date":
        wanted -= DATING
    if kind == "name" and (named := KIND.search(asked.text)) is not None:
        wanted -= _content(ReadText(named[1] or named[2]))
    if wanted <= asked.names and ASKS_WHAT.search(asked.text):
        return False
    said = [side.words | side.above_words for side in (one, other)]
    if kind in ("negation", "other"):
        # Each has one of two opposites.
        said = [said[0] | said[1]]
    return all(_has(words, word) for words in said for word in wanted)


def _has(words: frozenset[str], word: str) -> bool:
    """Whether a word, another form of it, or the noun or verb that is made of it, is one of the words."""
    return word in words or any(
        longer.startswith(shorter) and longer[len(shorter) :] in ENDINGS
        for one in words
        for shorter, longer in [sorted((FORMS.get(one, one), FORMS.get(word, word)), key=len)]
    )


def _content(text: ReadText) -> frozenset[str]:
    return frozenset(_meaning(token) for token in text.tokens if is_content(token))


def _meaning(token: TextToken) -> str:
    return MEASURES.get(token.stem, token.stem)


def _without_name(title: str, known: frozenset[str]) -> bool:
    """Whether a title has no name that is not known: capital letters, except those of its first word and of words for
    documents. Each of its lines is a title."""
    return not any(
        NAMELIKE.fullmatch(token.raw) and _meaning(token) not in known
        for line in title.split("\n")
        for token in [token for token in ReadText(line).tokens if is_content(token)][1:]
    )


class _Slots:
    """The places of a sentence where it differs."""

    def __init__(self, side: ReadStatement, found: Sequence[ExactDifference]) -> None:
        self._tokens, self._names = side.tokens, side.names
        self._title = {token.stem for token in ReadText(side.title).tokens}
        wanted = {token.low for one in found for token in ReadText(one.claimed).tokens}
        self.places = [at for at, token in enumerate(side.tokens) if token.low in wanted]
        first = self.places[0] if self.places else 0
        self._before = [token for token in side.tokens[:first] if token.low[0].isalnum() and token.low not in ARTICLES]
        self._leading = self._before[-1].low if self._before else ""

    @property
    def is_one(self) -> bool:
        """Whether they are next to each other. A negation that only the other has has no place."""
        return all(
            after - before == 1 or not any(map(is_content, self._tokens[before + 1 : after]))
            for before, after in zip(self.places, self.places[1:], strict=False)
        )

    @property
    def is_only_name(self) -> bool:
        """Whether only one name can stand there: "is X", "was made by X", "was born in X". Not if it is the title of
        the document, which the sentence speaks of, or a part of a name that the other has too."""
        if not self.places or any(self._tokens[at].stem in self._title for at in self.places):
            return False
        last = self.places[-1]
        after = self._tokens[last + 1].raw if last + 1 < len(self._tokens) else ""
        has_verb = any(token.low in BE for token in self._before)
        return self._leading in LEADING and has_verb and not after[:1].isupper()

    def is_asked(self, asked: ReadStatement, kind: ConflictKind) -> bool:
        """Whether what stands there may be what is asked for, and is said of what is asked about: words before it that
        the question does not have ("the director of", "was renamed in") make it something else."""
        if kind in ("negation", "other"):
            return True
        if not self.places:
            return False
        before = {_meaning(token) for token in self._before if is_content(token)} - self._names - NEUTRAL
        if not all(_has(asked.words, word) for word in before):
            return False
        if kind == "name":
            first = ASKS.search(asked.text)
            place = {"where": True, "who": False}.get(first[0].lower()) if first is not None else None
            return place is None or place == (self._leading in PLACES)
        return self._is_number_asked(asked, kind)

    def _is_number_asked(self, asked: ReadStatement, kind: ConflictKind) -> bool:
        first, last = self.places[0], self.places[-1]
        near = self._tokens[max(0, first - NEAR) : last + NEAR + 1]
        if (counted := COUNTED.search(asked.text)) is not None:
            return not _content(ReadText(counted[1])).isdisjoint(map(_meaning, near))
        if kind == "date":
            # "When does it open" does not ask when it opened.
            return not ASKS_NOW.match(asked.text) or not any(
                token.low.endswith("ed") and token.stem in asked.words for token in self._before
            )
        if ASKS_DATE_ONLY.match(asked.text):
            return any(TIME.fullmatch(self._tokens[at].raw) for at in self.places)
        if (how := ASKS_HOW.search(asked.text)) is not None:
            word = how[1].lower()
            units = self._tokens[max(0, first - 1) : last + 2]
            return any(HOW[word].fullmatch(token.raw) or _meaning(token) == word for token in [*units, *self._before])
        # "has 3 floors" says something of floors.
        return self._leading not in HAVE or not asked.words.isdisjoint(map(_meaning, self._tokens[first : last + 3]))

    def is_numbered(self, question: str) -> bool:
        asked = question.lower().split()
        before = [self._tokens[at - 1].low for at in self.places if at]
        return any(word in NUMBERED and word not in asked for word in before)


def _more(side: ReadStatement, other: ReadStatement, slots: _Slots) -> list[str] | None:
    """The words that only this one has, at its end. None if it has some elsewhere, or if they restrict it."""
    known = other.words | other.above_words | NEUTRAL
    places = set(slots.places)
    last = max(
        (
            at
            for at, token in enumerate(side.tokens)
            if at in places or (is_content(token) and _meaning(token) in other.words)
        ),
        default=-1,
    )
    own = [
        at
        for at, token in enumerate(side.tokens)
        if at not in places and is_content(token) and _meaning(token) not in known
    ]
    if any(at < last for at in own):
        return None
    if own and any(token.low in RESTRICTING for token in side.tokens[last + 1 : own[0]]):
        return None
    if QUALIFYING & side.reading.words - other.reading.words:
        return None
    return [side.tokens[at].stem for at in own]
