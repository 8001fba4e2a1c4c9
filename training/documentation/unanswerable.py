"""Questions that a passage does not answer although it looks as if it might."""

import re
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from training.documentation.asking import Place, is_code
from training.documentation.passages import Found, normal
from training.documentation.structure import Thing, Version, leaves_of
from training.documentation.things import ADDED, DEFAULTS, named


class Unanswerable(NamedTuple):
    """`cut` are the units that the passage loses."""

    text: str
    kind: str
    cut: tuple[int, ...] = ()


class Names:
    """The names of things by package and kind, to exchange one for another."""

    def __init__(self, found: Sequence[Found]) -> None:
        self._names: dict[str, list[str]] = defaultdict(list)
        for each in found:
            if (thing := each.question.thing) is not None:
                self._names[f"{each.passage.package} {thing.kind}"].append(_short(thing))
                self._names[thing.kind].append(_short(thing))

    def other(self, found: Found, thing: Thing, random: Random) -> str | None:
        """A name of the same kind that the passage does not have, most often of the same package."""
        names = self._names[thing.kind if random.random() < 0.25 else f"{found.passage.package} {thing.kind}"]
        for _ in range(5):
            name = random.choice(names)
            if len(name) > 3 and is_code(name) and name != _short(thing) and normal(name) not in found.passage.words:
                return name
        return None


def _short(thing: Thing) -> str:
    return thing.names[0].rpartition(".")[2] or thing.names[0]


def unanswerable(found: Found, names: Names, random: Random) -> Unanswerable | None:
    """One of the ways to ask this passage what it does not answer; None if the drawn way does not fit."""
    draw = random.random()
    if draw < 0.45:
        return _cut(found)
    return _swapped(found, names, random) if draw < 0.75 else _missing(found, random)


def _cut(found: Found) -> Unanswerable | None:
    """The same question, to the passage without the units that answer."""
    cut = tuple(sorted({*found.units, *found.rest}))
    left = [unit.text for number, unit in enumerate(found.passage.page.units) if number not in cut]
    rest = normal(" ".join(left))
    answer = normal(found.question.answer or "")
    if len(rest.split()) < 15 or (len(answer) > 3 and answer in rest):
        return None
    evidence = [normal(found.passage.page.units[number].text) for number in found.units]
    if any(text in rest for text in evidence):
        return None
    return Unanswerable(found.question.text, "cut", cut)


def _swapped(found: Found, names: Names, random: Random) -> Unanswerable | None:
    """The same question about another thing of this kind, which the passage does not mention."""
    thing = found.question.thing
    if thing is None or found.question.kind == "thing-which":
        return None
    spellings = sorted(
        {*thing.names, *(name.rpartition(".")[2] for name in thing.names)}, key=lambda name: (-len(name), name)
    )
    own = next((name for name in spellings if name and name in found.question.text), None)
    other = names.other(found, thing, random)
    if own is None or other is None or len(own) < 3:
        return None
    return Unanswerable(found.question.text.replace(own, other), "swap")


def _missing(found: Found, random: Random) -> Unanswerable | None:
    """A property that the description of the thing does not give."""
    thing = found.question.thing
    if thing is None or thing.kind in ("term", "class", "exception", "item"):
        return None
    text = " ".join(leaf.words for node in thing.body for leaf in leaves_of(node)) + found.passage.text
    has_version = any(isinstance(node, Version) for node in thing.body) or re.search(r"(?i)version|since|\d\.\d", text)
    has_default = "default" in thing.fields or re.search(r"(?i)default|if (?:not|none|omitted|unset)", text)
    forms = [form for form, has in ((DEFAULTS, has_default), (ADDED, has_version)) if not has]
    if not forms or (forms[0] is DEFAULTS and thing.kind in ("function", "method", "command", "directive", "signal")):
        return None
    name = named(thing, Place(found.passage.package), random).plain
    return Unanswerable(random.choice(random.choice(forms)).format(x=name), "missing")
