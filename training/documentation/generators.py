"""Makes questions from the structure of a document, each with the leaves that answer it."""

import re
from collections.abc import Iterator, Sequence
from random import Random

from training.documentation.asking import Place, Question, is_informative
from training.documentation.blocks import first_leaves, of_code, of_list, of_table
from training.documentation.prose import asked, how_to, stands_alone
from training.documentation.structure import Code, Items, Leaf, Node, Note, Paragraph, Section, Table, Thing, Version
from training.documentation.things import DOCSTRING_SECTIONS, of_docstring_section, of_thing
from training.documentation.wording import AMBIGUOUS, VERBS, first_person, lower_first, verb_phrase


def questions(nodes: Sequence[Node], place: Place, random: Random) -> Iterator[Question]:
    """All questions of these nodes and of those below."""
    before: Node | None = None
    for node in nodes:
        match node:
            case Section() if node.title.words in DOCSTRING_SECTIONS and place.owner:
                yield from of_docstring_section(node, place, random)
            case Section():
                yield from _section(node, place, random)
                named_one = bool(node.body) and isinstance(node.body[0], Thing) and node.body[0].term is node.title
                owner = node.title.words if node.level > 1 and named_one else place.owner
                yield from questions(node.body, Place(place.package, owner), random)
            case Thing():
                yield from of_thing(node, place, random)
                owner = node.names[0] if node.kind in ("class", "function", "method", "exception") else place.owner
                yield from questions(node.body, Place(place.package, owner), random)
            case Note():
                yield from questions(node.body, place, random)
            case Paragraph():
                for leaf in node.sentences:
                    yield from (
                        Question(each.text, "prose", (leaf,), each.answer) for each in asked(leaf.words, random)
                    )
            case Items():
                yield from of_list(node, before, random)
                for item in node.items:
                    yield from questions(item, place, random)
            case Code():
                yield from of_code(node, before, random)
            case Table():
                yield from of_table(node, random)
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
_NO_TOPIC = frozenset(("for", "in", "with", "on", "from", "to", "by", "using", "if", "why", "how", "what", "start"))
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
    if words[0].lower() in _NO_TOPIC or (words[0].lower() in VERBS and words[0].lower() not in AMBIGUOUS):
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


def _as_topic(title: str) -> str:
    """In the case of running text: capitals only in names and acronyms."""
    return " ".join(lower_first(word) for word in title.split(" "))


def _beginning(body: Sequence[Node]) -> tuple[Leaf, ...]:
    """The first informative sentences of a section, and the code that they introduce."""
    found: list[Leaf] = []
    for node in body[:4]:
        if isinstance(node, Paragraph):
            if found and not found[-1].words.endswith(":") and sum(len(leaf.words) for leaf in found) > 120:
                break
            found += [leaf for leaf in node.sentences if is_informative(leaf) or leaf.words.endswith(":")][
                : 3 - len(found)
            ]
        elif isinstance(node, Code) and found:
            return (*found[-2:], node.text)
        elif isinstance(node, Items) and found and found[-1].words.endswith(":"):
            return (*found[-1:], *first_leaves(node)[:6])
        elif found or isinstance(node, Section):
            break
    return tuple(found[:3]) if any(is_informative(leaf) for leaf in found) else ()
