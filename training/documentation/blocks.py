"""Questions about code that a sentence introduces, lists and tables."""

# ruff: noqa: RUF001  dashes are meant

import re
from collections.abc import Iterator, Sequence
from random import Random

from training.documentation.asking import Question, is_code
from training.documentation.prose import Asked, clause, how_to, stands_alone
from training.documentation.structure import Code, Items, Leaf, Node, Paragraph, Table, Thing, leaves_of
from training.documentation.things import MEANS, WHAT
from training.documentation.wording import THIRDS, VERBS, first_person, lower_first, verb_phrase


def first_leaves(items: Items) -> list[Leaf]:
    return [leaf for item in items.items for leaf in list(leaves_of(item[0]))[:1] if item]


_SHOWS = re.compile(
    r"(?i)(?:.*\b(?:example|snippet|code|this)\b.*?\b(?:shows|demonstrates|illustrates) how (?:to|you can) |"
    r"(?:for (?:example|instance), )?(?:in order )?to |.*?\bif you (?:want|need|wish) to |"
    r"(?:for (?:example|instance), )?(?:you can|you may|you could) (?:also |then |even )?|"
    r".*?\b(?:example|examples) of (?:how to )?)(?P<v>\w+ [^:]{6,140}):?$"
)
# Where the purpose ends and what to do begins.
_WHAT_TO_DO = re.compile(
    r", (?:you|use|we|do|just|add|set|one|simply|the|call|run|type|execute|enter|try|issue|pass|define|create|write|"
    r"put|specify|it|cd)\b| (?:by|like (?:this|so)|as follows|with the following|"
    r"using the following|as in|in this way)\b"
)
_EXAMPLES = ("Show me an example of {}", "example of {}", "What does an example of {} look like?", "{} example")


def of_code(code: Code, before: Node | None, random: Random) -> Iterator[Question]:
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


def of_list(items: Items, before: Node | None, random: Random) -> Iterator[Question]:
    lead = before.sentences[-1] if isinstance(before, Paragraph) else None
    leaves = first_leaves(items)
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
    if not is_code(name) or (name.isupper() and len(name) < 5):
        return
    shown = f"`{name}`" if random.random() < 0.4 else name
    forms = MEANS if re.search(r"[A-Z]\d{2,}$", name) else WHAT
    thing = Thing("item", (name,), leaves[0], [])
    yield Question(random.choice(forms).format(x=shown), "item", (leaves[0],), None, thing)


_DESCRIBES = re.compile(
    r"(?i)description|meaning|purpose|effect|behaviou?r|explanation|details|notes?|comment|what it does|usage"
)
_DECIDES = re.compile(r"(?i)(?:(?:yes|no|x|true|false|n/a)\b|[✓✔✖✗-])")


def of_table(table: Table, random: Random) -> Iterator[Question]:
    keys = [row[0].words for row in table.rows]
    key_name = lower_first(table.header[0].words).strip(" :") or "row"
    for row in table.rows:
        key = row[0].words
        if not 0 < len(key) < 60 or keys.count(key) > 1 or not re.search("[a-z]{2}", table.header[0].words):
            continue
        for title, cell, column in zip(table.header[1:], row[1:], range(1, len(row)), strict=True):
            if not cell.words or not title.words or len(cell.words) > 200 or cell.words == key:
                continue
            shown = f"`{key}`" if is_code(key) and random.random() < 0.4 else key
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
    first, _, rest = title.partition(" ")
    base = THIRDS.get(first.lower())
    if _DECIDES.match(value):
        if base:
            yield Asked(f"Does {key} {base} {rest}?")
        else:
            yield Asked(
                random.choice(("Does {x} support {t}?", "Is {x} available with {t}?", "{x} {t}")).format(x=key, t=title)
            )
    elif base and not rest:
        yield Asked(f"What does {key} {base}?", value if len(value) < 80 else None)
    elif _DESCRIBES.search(title):
        yield Asked(
            random.choice(WHAT[:8]).format(x=random.choice((key, f"the {key_name} {key}", key))),
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
