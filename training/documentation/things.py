"""Questions about what is described by name: settings, options, parameters, functions, terms."""

import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from training.documentation.asking import Place, Question, is_code, is_informative
from training.documentation.prose import clause, stands_alone
from training.documentation.structure import Code, Leaf, Paragraph, Section, Thing, Version
from training.documentation.wording import AMBIGUOUS, THIRDS, VERBS, first_person, lower_first, third

WHAT = (
    *("What does {x} do?", "What is {x} for?", "What is {x}?", "what is {x}", "What does {x} mean?", "{x} meaning"),
    *("What is the purpose of {x}?", "What is {x} used for?", "{x}", "Explain {x}", "Why would I use {x}?"),
    *("When do I need {x}?", "what does {x} do"),
)
MEANS = ("What does {x} mean?", "{x}", "What is {x}?", "{x} meaning", "Why do I get {x}?")
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
    if thing.kind in ("term", "value") and not is_code(name):
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


def of_thing(thing: Thing, place: Place, random: Random) -> Iterator[Question]:
    if not all(1 < len(name) < 70 for name in thing.names) or (
        thing.kind == "term" and len(thing.names[0].split()) > 5
    ):
        return
    x = named(thing, place, random)
    described = list(_description(thing))
    if described:
        evidence = (thing.term, *described[:2]) if len(described[0].words) < 90 else (thing.term, described[0])
        yield Question(random.choice(WHAT).format(x=x.plain), "thing-what", evidence, None, thing, thing)
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
                leaf for leaf in node.sentences if is_informative(leaf) and not leaf.words.lower().startswith("default")
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
    if thing.kind == "term" and not is_code(thing.names[0]):
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


DOCSTRING_SECTIONS = frozenset(("Returns", "Yields", "Raises", "See Also", "References", "Warns"))


def of_docstring_section(section: Section, place: Place, random: Random) -> Iterator[Question]:
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
