"""Makes questions from the structure of a document, each with the leaves that answer it."""

# ruff: noqa: RUF001  dashes are meant, and word lists read better as words

import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from training.documentation.prose import Asked, asked, clause, how_to, stands_alone
from training.documentation.structure import (
    Code,
    Items,
    Leaf,
    Node,
    Note,
    Paragraph,
    Section,
    Table,
    Thing,
    Version,
    leaves_of,
)
from training.documentation.wording import AMBIGUOUS, THIRDS, VERBS, first_person, lower_first, third, verb_phrase


class Question(NamedTuple):
    """`answer` is the part of the evidence that answers, if it is short. `thing` is what the question is about."""

    text: str
    kind: str
    evidence: tuple[Leaf, ...]
    answer: str | None = None
    thing: Thing | None = None
    # What a passage must lose so that it does not answer; None if the evidence is all.
    scope: Node | None = None


class Place(NamedTuple):
    """Where a node is: the headings above it, and the class or function that it belongs to."""

    package: str
    headings: tuple[str, ...] = ()
    owner: str = ""


def questions(nodes: Sequence[Node], place: Place, random: Random) -> Iterator[Question]:
    """All questions of these nodes and of those below."""
    before: Node | None = None
    for node in nodes:
        match node:
            case Section() if node.title.words in _NUMPYDOC and place.owner:
                yield from _numpydoc(node, place, random)
            case Section():
                yield from _section(node, place, random)
                named_one = bool(node.body) and isinstance(node.body[0], Thing) and node.body[0].term is node.title
                owner = node.title.words if node.level > 1 and named_one else place.owner
                headings = (*place.headings, node.title.words)
                yield from questions(node.body, Place(place.package, headings, owner), random)
            case Thing():
                yield from _thing(node, place, random)
                owner = node.names[0] if node.kind in ("class", "function", "method", "exception") else place.owner
                yield from questions(node.body, Place(place.package, place.headings, owner), random)
            case Note():
                yield from questions(node.body, place, random)
            case Paragraph():
                for leaf in node.sentences:
                    yield from (
                        Question(each.text, "prose", (leaf,), each.answer) for each in asked(leaf.words, random)
                    )
            case Items():
                yield from _items(node, before, random)
                for item in node.items:
                    yield from questions(item, place, random)
            case Code():
                yield from _code(node, before, random)
            case Table():
                yield from _table(node, random)
            case Version():
                pass
        before = node


def _is_name(words: str) -> bool:
    return re.fullmatch(r"[\w.]+(?:\(.*\))?", words) is not None


# Headings that say nothing about their section.
_EMPTY_HEADINGS = re.compile(
    r"(?i)(?:overview|introduction|notes?|examples?|see also|summary|usage|details|description|reference|background|"
    r"basics?|api|parameters|returns|raises|yields|attributes|methods|warnings?|options|arguments|settings|misc\w*|"
    r"other|general|more|advanced|"
    r"conclusion|next steps|what's next|contents|features|further reading|installation|bug ?fixes|changes|contributing|"
    r"(?:a |an |the )?(?:simple |full |complete |basic |quick )?example\b.*)"
)
_TOPIC = (
    *("{}", "{}", "{p} {}", "How does {} work?", "Tell me about {}", "Explain {}", "Where can I read about {}?"),
    *("information on {}", "{} explained"),
)
_WHEN = re.compile(r"(?i)when (?:to|should (?:i|you)) (?P<v>\w+ .+)")
_DEFINES = re.compile(r"(?i)\b(?:is|are|refers to|means|allows?|provides?|lets?|describes?|represents?|consists? of)\b")


def _section(section: Section, place: Place, random: Random) -> Iterator[Question]:
    title = re.sub(r"^\d+(?:\.\d+)*[.)]?\s+", "", section.title.words).strip(" :")
    evidence = _beginning(section.body)
    if not evidence or not 3 < len(title) < 90 or _EMPTY_HEADINGS.fullmatch(title):
        return
    if title.endswith("?") and stands_alone(title):
        yield Question(first_person(title), "heading", evidence, scope=section)
        return
    if found := _WHEN.fullmatch(title):
        yield Question(
            random.choice(("When should I {}?", "when to {}")).format(found["v"]), "heading", evidence, scope=section
        )
        return
    if phrase := verb_phrase(title):
        for each in how_to(lower_first(phrase), random):
            yield Question(each.text, "heading-how", evidence, scope=section)
        return
    words = title.split()
    if words[0].lower() in VERBS and words[0].lower() not in AMBIGUOUS:
        return
    if not 1 < len(words) < 7 or _is_name(title) or not stands_alone(title) or title[0].isdigit():
        return
    topic = _as_topic(title)
    evidence = evidence if evidence[0].words.endswith(":") else evidence[:2]
    head = re.sub(r"s$", "", words[-1].lower())
    if (
        head in evidence[0].words.lower()
        and _DEFINES.search(evidence[0].words)
        and len(words) < 5
        and not re.search(r"\b(?:and|or|&)\b|&", title)
    ):
        noun = re.split(r" (?:of|for|in|with|to|on|from) ", title)[0]
        is_many = noun.endswith("s") and not noun.endswith(("ss", "us", "is"))
        form = random.choice(("What {is_} {x}?", "What {is_} {x}?", "what {is_} {x}", "{x} meaning", "Explain {x}"))
        yield Question(form.format(is_="are" if is_many else "is", x=topic), "heading-what", evidence, scope=section)
    else:
        yield Question(random.choice(_TOPIC).format(topic, p=place.package), "heading-topic", evidence, scope=section)


_NUMPYDOC = frozenset(("Returns", "Yields", "Raises", "See Also", "References", "Warns"))


def _numpydoc(section: Section, place: Place, random: Random) -> Iterator[Question]:
    """What a function returns and when it raises, from the sections of its docstring."""
    function = place.owner if random.random() < 0.6 else place.owner.rpartition(".")[2]
    for node in section.body:
        if not isinstance(node, Thing) or not (described := list(_description(node))):
            continue
        evidence = (node.term, described[0])
        if section.title.words in ("Returns", "Yields"):
            verb = "return" if section.title.words == "Returns" else "yield"
            yield Question(random.choice(_RETURNS).format(f=function, v=verb), "returns", evidence)
        elif section.title.words == "Raises":
            yield Question(random.choice(_RAISES).format(f=function, e=node.names[0]), "raises", evidence)


_RETURNS = (
    "What does {f} {v}?",
    "what does {f} {v}",
    "{f} {v} value",
    "What is the result of {f}?",
    "What do I get from {f}?",
)
_RAISES = (
    "When does {f} raise {e}?",
    "Why does {f} raise {e}?",
    "{f} {e}",
    "What causes {e} in {f}?",
    "{f} raises {e}",
)


def _as_topic(title: str) -> str:
    """In the case of running text: capitals only in names and acronyms."""
    return " ".join(lower_first(word) for word in title.split(" "))


_UNINFORMATIVE = re.compile(
    r"(?i)(?:see\b|for (?:more|further|a full|a complete|example|instance)|tutorial:|example|note\b|say you|suppose|"
    r"this (?:section|document|page|chapter|guide)|scope:|here (?:is|are)|import path|new in|changed in|first,|let's|"
    r"in this|the following|as |refer to|consult)"
)


def _informative(leaf: Leaf) -> bool:
    return len(leaf.words) > 25 and not _UNINFORMATIVE.match(leaf.words)


def _beginning(body: Sequence[Node]) -> tuple[Leaf, ...]:
    """The first informative sentences of a section, and the code that they introduce."""
    found: list[Leaf] = []
    for node in body[:4]:
        if isinstance(node, Paragraph):
            if found and not found[-1].words.endswith(":") and sum(len(leaf.words) for leaf in found) > 120:
                break
            found += [leaf for leaf in node.sentences if _informative(leaf) or leaf.words.endswith(":")][
                : 3 - len(found)
            ]
        elif isinstance(node, Code) and found:
            return (*found[-2:], node.text)
        elif isinstance(node, Items) and found and found[-1].words.endswith(":"):
            return (*found[-1:], *_first_leaves(node)[:6])
        elif found or isinstance(node, Section):
            break
    return tuple(found[:3]) if any(_informative(leaf) for leaf in found) else ()


def _first_leaves(items: Items) -> list[Leaf]:
    return [leaf for item in items.items for leaf in list(leaves_of(item[0]))[:1] if item]


# Descriptions by name

_WHAT = (
    *("What does {x} do?", "What is {x} for?", "What is {x}?", "what is {x}", "What does {x} mean?", "{x} meaning"),
    *("What is the purpose of {x}?", "What is {x} used for?", "{x}", "Explain {x}", "Why would I use {x}?"),
    *("When do I need {x}?", "what does {x} do"),
)
_MEANS = ("What does {x} mean?", "{x}", "What is {x}?", "{x} meaning", "Why do I get {x}?")
_WHICH = (
    *(
        "Which {k} {d}?",
        "Which {k} {d}?",
        "What {k} {d}?",
        "which {k} {d}",
        "Is there a {k} that {d}?",
        "What is the {k} that {d}?",
    ),
    *("What's the name of the {k} that {d}?", "{k} that {d}", "I am looking for the {k} that {d}"),
)
DEFAULTS = (
    *(
        "What is the default of {x}?",
        "What is the default value of {x}?",
        "What is {x} set to by default?",
        "default of {x}",
    ),
    *(
        "What does {x} default to?",
        "{x} default",
        "What's the default for {x}?",
        "{x} default value",
        "Default value of {x}?",
    ),
    *("What value does {x} have if I do not set it?", "Which value is used for {x} by default?"),
)
_TYPES = (
    *("What type is {x}?", "Which type must {x} have?", "What type of value does {x} take?", "type of {x}"),
    *("Which values does {x} accept?", "What can {x} be?", "What kind of value does {x} expect?"),
)
ADDED = (
    *(
        "Since which version is {x} available?",
        "In which version was {x} added?",
        "When was {x} introduced?",
        "{x} since version",
    ),
    *("Which version added {x}?", "What version do I need for {x}?", "From which version on can I use {x}?"),
)
_CHANGED = (
    *(
        "What changed in {x} in version {v}?",
        "What is new in {x} in {v}?",
        "How did {v} change {x}?",
        "{x} changes in {v}",
    ),
)
_DEPRECATED = (
    "Since when is {x} deprecated?",
    "In which version was {x} deprecated?",
    "Is {x} deprecated?",
    "{x} deprecated",
)

_DEFAULT_IN_TEXT = re.compile(
    r"(?:^|\b(?:and|,|;|which|it|value|this) )(?:[Tt]he )?(?:[Dd]efault(?: value)?(?: is|:)|[Dd]efaults to|default is) "
    r"(?P<v>[^\s,;:()][^,;:()]{0,60}?)"
    r"(?:\.$|[,;(]|\. |$| if| when| which| unless|, )|\([Dd]efault:? (?P<w>[^()]{1,50})\)"
)


class Named(NamedTuple):
    """A thing as it is spoken of: `plain` alone, `full` with what it is and what it belongs to."""

    plain: str
    full: str


def named(thing: Thing, place: Place, random: Random) -> Named:
    """The thing in words, with or without markup, with or without its kind."""
    name = random.choice(thing.names)
    if "." in name and (random.random() < 0.5 or name.startswith("_")) and not name.startswith("."):
        name = name.rpartition(".")[2]
    code = random.random() < 0.3
    is_word = re.fullmatch(r"[a-z]+", name) is not None or len(name) < 3
    if thing.kind in ("function", "method") and random.random() < 0.4 and not name.endswith(")"):
        name += "()"
    shown = f"`{name}`" if code else name
    kind = random.choice(("argument", "parameter")) if thing.kind == "parameter" else thing.kind
    if thing.kind in ("term", "value") and not _is_code(name):
        return Named(shown, shown)
    if kind in ("term", "value"):
        kind = ""
    owner = place.owner.rpartition(".")[2].split("(")[0]
    owned = (
        f" of {owner}"
        if owner and owner not in name and kind in ("parameter", "argument", "attribute", "method")
        else ""
    )
    full = f"the {shown} {kind}".rstrip() + (owned if is_word or random.random() < 0.6 else "")
    if not kind:
        full = shown
    return Named(full if is_word or random.random() < 0.35 else shown, full)


def _is_code(name: str) -> bool:
    return re.fullmatch(r"\S+", name) is not None and re.fullmatch(r"[A-Z]?[a-z]+", name) is None


def _thing(thing: Thing, place: Place, random: Random) -> Iterator[Question]:
    if not all(1 < len(name) < 70 for name in thing.names) or (
        thing.kind == "term" and len(thing.names[0].split()) > 5
    ):
        return
    x = named(thing, place, random)
    described = list(_description(thing))
    if described:
        evidence = (thing.term, *described[:2]) if len(described[0].words) < 90 else (thing.term, described[0])
        yield Question(random.choice(_WHAT).format(x=x.plain), "thing-what", evidence, None, thing, thing)
        yield from _which(thing, described[0], place, random)
    yield from _default(thing, x, random)
    yield from _versions(thing, x, random)
    if (kind := thing.fields.get("type")) is not None and thing.kind != "class":
        yield Question(random.choice(_TYPES).format(x=x.plain), "type", (kind,), kind.words, thing)
    yield from _uses(thing, x, random)


def _description(thing: Thing) -> Iterator[Leaf]:
    for node in thing.body[:4]:
        if isinstance(node, Paragraph):
            good = [
                leaf for leaf in node.sentences if _informative(leaf) and not leaf.words.lower().startswith("default")
            ]
            yield from good
            if good:
                return


def _which(thing: Thing, leaf: Leaf, place: Place, random: Random) -> Iterator[Question]:
    """From the description to the name."""
    doing = does(leaf.words, random)
    if (
        doing is None
        or len(doing.split()) < 5
        or not stands_alone(doing)
        or thing.names[0].lower() in doing.lower()
        or "`" in doing
    ):
        return
    kind = thing.kind if thing.kind not in ("term", "value") else random.choice(("term", "name", "value"))
    if thing.kind == "term" and not _is_code(thing.names[0]):
        return
    if (
        place.owner
        and place.owner != thing.term.words
        and thing.kind in ("parameter", "attribute", "method")
        and random.random() < 0.6
    ):
        kind = f"{kind} of {place.owner.rpartition('.')[2].split('(')[0]}"
    form = random.choice(_WHICH).replace("a {k}", "an {k}" if kind[0] in "aeiou" else "a {k}")
    yield Question(form.format(k=kind, d=doing), "thing-which", (thing.term, leaf), thing.names[0], thing, thing)


_NOUN_HEADS = re.compile(
    r"(?:Maximum|Minimum|Number|Name|List|Path|Default|Size|Time|Amount|Dictionary|Import path|Base|Set) "
)
_IF_SET = re.compile(
    r"(?:If|When) (?:(?:this|set|it|enabled|given|specified|provided|true|True|False|false)\b[^,]{0,40}), (?P<b>.+)"
)


def does(sentence: str, random: Random) -> str | None:
    """What a thing does, in the third person, from the first sentence of its description."""
    said = clause(sentence, 18)
    if said is None:
        return None
    first, _, rest = said.partition(" ")
    word = first.lower()
    if word in THIRDS and not first.isupper():
        doing = f"{word} {rest}"
    elif (
        word in VERBS
        and first[0].isupper()
        and re.match(r"(?:the|a|an|all|any|whether|one|each|if|how|which|this|your)\b", rest)
    ):
        doing = f"{third(word)} {rest}"
    elif word == "whether":
        doing = f"{random.choice(('controls', 'determines', 'decides', 'says'))} whether {rest}"
    elif found := _IF_SET.match(said):
        doing = f"{random.choice(('makes sure that', 'has the effect that', 'means that'))} {found['b']}"
    elif word in ("the", "a", "an") and not _has_verb(said):
        doing = f"{random.choice(('is', 'gives', 'holds', 'sets', 'defines'))} {word} {rest}"
    elif _NOUN_HEADS.match(said) and not _has_verb(said):
        doing = f"{random.choice(('sets', 'gives', 'defines'))} the {lower_first(said)}"
    else:
        return None
    return first_person(doing)


def _has_verb(words: str) -> bool:
    """Whether a verb stands in the main clause."""
    main = re.split(r" (?:that|which|who|where|when|if|used|for) ", words)[0]
    verbs = (THIRDS.get(word, "") for word in main.split()[2:])
    return re.search(r" (?:is|are|was|can|will|may|must|should|has) ", main) is not None or any(
        verb and verb not in AMBIGUOUS for verb in verbs
    )


def _default(thing: Thing, x: Named, random: Random) -> Iterator[Question]:
    template = random.choice(DEFAULTS)
    if (value := thing.fields.get("default")) is not None:
        yield Question(template.format(x=x.plain), "default", (value,), value.words, thing)
        return
    for leaf in (leaf for node in thing.body if isinstance(node, Paragraph) for leaf in node.sentences):
        if thing.kind != "class" and (found := _DEFAULT_IN_TEXT.search(leaf.words)) is not None:
            answer = (found["v"] or found["w"]).strip().rstrip(".")
            yield Question(template.format(x=x.plain), "default", (leaf,), answer, thing)
            return


def _versions(thing: Thing, x: Named, random: Random) -> Iterator[Question]:
    for node in (node for node in thing.body if isinstance(node, Version)):
        match node.kind:
            case "added" if node.text.words == node.number:
                yield Question(random.choice(ADDED).format(x=x.plain), "version", (node.text,), node.number, thing)
            case "changed" if len(node.text.words) > len(node.number) + 15:
                text = random.choice(_CHANGED).format(x=x.plain, v=node.number)
                yield Question(text, "version", (node.text,), None, thing)
            case "deprecated":
                yield Question(
                    random.choice(_DEPRECATED).format(x=x.plain), "version", (node.text,), node.number, thing
                )
            case _:
                pass


_USES = (
    "How do I use {x}?",
    "Show an example of {x}",
    "{x} example",
    "example of using {x}",
    "How is {x} used?",
    "Give me an example for {x}",
)


def _uses(thing: Thing, x: Named, random: Random) -> Iterator[Question]:
    """The first example in a description."""
    for before, node in zip([None, *thing.body], thing.body, strict=False):
        if isinstance(node, Code):
            led = (
                before.sentences[-1:]
                if isinstance(before, Paragraph) and before.sentences[-1].words.endswith(":")
                else []
            )
            yield Question(random.choice(_USES).format(x=x.plain), "example", (*led, node.text), None, thing)
            return


# Code, lists and tables

_SHOWS = re.compile(
    r"(?i)(?:.*\b(?:example|snippet|code|this)\b.*?\b(?:shows|demonstrates|illustrates) how (?:to|you can) |"
    r"(?:for (?:example|instance), )?(?:in order )?to |.*?\bif you (?:want|need|wish) to |"
    r"(?:for (?:example|instance), )?(?:you can|you may|you could) (?:also |then |even )?|"
    r".*?\b(?:example|examples) of (?:how to )?)(?P<v>\w+ [^:]{6,140}):?$"
)
# Where the purpose ends and what to do begins.
_WHAT_TO_DO = re.compile(
    r", (?:you|use|we|do|just|add|set|one|simply|the|call|run|type|execute|enter|try|issue|pass|define|create|write|"
    r"put|specify|it|cd)\b| (?:by|like|as follows|with the following|using the following|as in|in this way)\b"
)
_EXAMPLES = ("Show me an example of {}", "example of {}", "What does an example of {} look like?", "{} example")


def _code(code: Code, before: Node | None, random: Random) -> Iterator[Question]:
    """What the sentence before the code says that it does."""
    if not isinstance(before, Paragraph):
        return
    lead = before.sentences[-1]
    found = _SHOWS.match(lead.words)
    if found is None or not lead.words.endswith(":"):
        return
    phrase = _WHAT_TO_DO.split(found["v"])[0]
    base = verb_phrase(phrase) or (phrase if phrase.split()[0].lower() in VERBS else None)
    if base is not None:
        yield from (Question(each.text, "code", (lead, code.text)) for each in how_to(lower_first(base), random))
    elif re.match(r"(?:an?|the) ", phrase) and (said := clause(phrase, 10)) and stands_alone(said):
        yield Question(random.choice(_EXAMPLES).format(said), "code", (lead, code.text))


_LEADS: Sequence[tuple[re.Pattern[str], Sequence[str]]] = (
    (
        re.compile(
            r"(?:Here are the|The following|These) (?:is a list of )?(?P<n>[a-z][\w -]{3,50}?) "
            r"(?P<v>are|can be|may be|must be|will be) (?P<r>\w[^:]{2,60}):"
        ),
        ("Which {n} {v} {r}?", "What {n} {v} {r}?", "list of {n} that {v} {r}"),
    ),
    (
        re.compile(
            r"There (?:are|exist) (?:\w+ )?(?P<n>(?:ways|types|kinds|options|methods|modes|levels|steps|rules|reasons|"
            r"forms|categories|cases|strategies|arguments|attributes|variables|approaches)\b[^:,]{0,60}):"
        ),
        ("What {n} are there?", "Which {n} are there?", "List the {n}"),
    ),
    (
        re.compile(
            r"(?P<s>[A-Z][\w.()-]*(?: [\w.()-]+){0,4}?) (?:also )?(?P<v>supports|provides|accepts|takes|offers|defines|"
            r"has|includes|contains|requires|recognizes|understands|uses|adds|exposes) "
            r"(?:the following|these|several|two|three|four|five|a number of|the) (?:\w+ )?(?P<n>[a-z][\w -]{3,40}):"
        ),
        ("Which {n} does {s} {v}?", "What {n} does {s} {v}?", "{s} {n}"),
    ),
    (
        re.compile(
            r"(?P<n>(?:Supported|Available|Possible|Valid|Allowed|Accepted|Recognized) [a-z][\w -]{3,40}?)"
            r"(?: (?:are|include|values are))?:"
        ),
        ("What are the {n}?", "Which {n} are there?", "{n}", "list the {n}"),
    ),
    (
        re.compile(
            r"(?P<n>The [a-z][\w -]{3,50}) (?:are|include|is one of|can be one of|must be one of|may be one of):"
        ),
        ("What are {n}?", "Which are {n}?", "Name {n}"),
    ),
)


def _items(items: Items, before: Node | None, random: Random) -> Iterator[Question]:
    lead = before.sentences[-1] if isinstance(before, Paragraph) else None
    leaves = _first_leaves(items)
    if lead is not None and lead.words.endswith(":") and 2 <= len(leaves) <= 10:
        text = next((leaf for leaf in _listed(lead.words, random)), None)
        if text:
            yield Question(text, "list", (lead, *leaves))
    for item in items.items:
        if item and isinstance(item[0], Paragraph):
            yield from _named_item(item[0].sentences, random)


def _listed(lead: str, random: Random) -> Iterator[str]:
    for pattern, forms in _LEADS:
        if found := pattern.match(lead):
            parts = {name: first_person(lower_first(value or "")) for name, value in found.groupdict().items()}
            if parts.get("v") in THIRDS:
                parts["v"] = THIRDS[parts["v"]]
            parts["v"] = {"has": "have", "takes": "take"}.get(parts.get("v", ""), parts.get("v", ""))
            if all(stands_alone(part) for part in parts.values()):
                yield random.choice(forms).format(**parts)
                return
    if (found := re.match(r"(?:In order t|T)o (?P<v>\w+ [^,:]{6,80})[,:]", lead)) and found["v"].split()[0] in VERBS:
        yield from (each.text for each in how_to(found["v"], random))


def _named_item(leaves: Sequence[Leaf], random: Random) -> Iterator[Question]:
    """An item that begins with a name: "`x`: text", "x - text"."""
    found = re.match(
        r"(?P<x>[\w.@%-]{2,40}(?:\(\))?)(?: ?\([^)]{1,40}\))?(?:: | -- | - | – | — )(?P<d>\w.{20,})", leaves[0].words
    )
    if found is None:
        return
    name = found["x"]
    if not _is_code(name) or (name.isupper() and len(name) < 5):
        return
    shown = f"`{name}`" if random.random() < 0.4 else name
    forms = _MEANS if re.search(r"[A-Z]\d{2,}$", name) else _WHAT
    thing = Thing("item", (name,), leaves[0], [])
    yield Question(random.choice(forms).format(x=shown), "item", (leaves[0],), None, thing)


_DESCRIBES = re.compile(
    r"(?i)description|meaning|purpose|effect|behaviou?r|explanation|details|notes?|comment|what it does|usage"
)
_DECIDES = re.compile(r"(?i)(?:(?:yes|no|x|true|false|n/a)\b|[✓✔-]$)")


def _table(table: Table, random: Random) -> Iterator[Question]:
    keys = [row[0].words for row in table.rows]
    key_name = lower_first(table.header[0].words).strip(" :") or "row"
    for row in table.rows:
        key = row[0].words
        if not 0 < len(key) < 60 or keys.count(key) > 1 or not re.search("[a-z]{2}", table.header[0].words):
            continue
        for title, cell, column in zip(table.header[1:], row[1:], range(1, len(row)), strict=True):
            if not cell.words or not title.words or len(cell.words) > 200 or cell.words == key:
                continue
            shown = f"`{key}`" if _is_code(key) and random.random() < 0.4 else key
            if not re.search("[A-Za-z]{2}", key):
                shown = f"{key_name} {key}"
            for each in _of_cell(shown, key_name, title.words, cell.words, random):
                yield Question(each.text, "table", (row[0], cell), each.answer)
            others = [other[column].words for other in table.rows]
            name = lower_first(title.words)
            if (
                others.count(cell.words) == 1
                and len(cell.words) < 60
                and not _DECIDES.match(cell.words)
                and len(key_name) < 30
            ):
                if _DESCRIBES.search(name):
                    text = f'Which {key_name} means "{cell.words.rstrip(".")}"?'
                else:
                    text = random.choice(
                        ("Which {k} has the {n} {c}?", "What is the {k} for {n} {c}?", "{k} with {n} {c}")
                    ).format(k=key_name, n=name, c=cell.words.rstrip("."))
                yield Question(text, "table-reverse", (row[0], cell), key)


def _of_cell(key: str, key_name: str, title: str, value: str, random: Random) -> Iterator[Asked]:
    title = title.strip(" :?")
    if _DECIDES.match(value):
        first, _, rest = title.partition(" ")
        if base := THIRDS.get(first.lower()):
            yield Asked(f"Does {key} {base} {rest}?")
        else:
            yield Asked(
                random.choice(("Does {x} support {t}?", "Is {x} available with {t}?", "{x} {t}")).format(x=key, t=title)
            )
    elif _DESCRIBES.search(title):
        yield Asked(
            random.choice(_WHAT[:8]).format(x=random.choice((key, f"the {key_name} {key}", key))),
            value if len(value) < 80 else None,
        )
    else:
        forms = (
            "What is the {t} of {x}?",
            "Which {t} does {x} have?",
            "What is the {t} for {x}?",
            "{x} {t}",
            "{t} of the {k} {x}?",
        )
        yield Asked(
            random.choice(forms).format(x=key, t=lower_first(title).strip(" :"), k=key_name),
            value if len(value) < 80 else None,
        )
