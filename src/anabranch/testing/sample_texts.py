"""Things to read: three short texts, and as many longer ones as a benchmark wants, always the same."""

import random

from anabranch.testing.source import Document

RIVERS = (
    Document(
        title="What an anabranch is",
        content="An anabranch is a section of a river that leaves the main stem and rejoins it downstream. "
        "Islands between the channels can last for centuries and carry grown forest.",
        score=0.92,
    ),
    Document(
        title="Rivers that divide",
        content="Anabranching rivers divide where the valley is flat and the banks are firm. "
        "The Ob, the Niger and the Murray all have long reaches of this kind.",
        score=0.84,
    ),
    Document(
        title="Measuring a flow",
        content="The discharge of a river is its mean velocity times the area of its cross-section. "
        "Each channel is measured on its own, and the sum must agree with the reach upstream.",
        score=0.71,
    ),
)

_PLACES = ("valley", "estuary", "delta", "upland", "gorge", "floodplain", "wetland", "catchment")
_THINGS = ("gauge", "sluice", "channel", "levee", "meander", "sandbar", "culvert", "weir")
_DEEDS = ("carried", "diverted", "measured", "shaped", "flooded", "drained", "deepened", "slowed")
_KINDS = ("broad", "shallow", "silted", "ancient", "narrow", "seasonal", "restored", "tidal")
_WHEN = (
    "after the spring thaw",
    "in a dry year",
    "before the survey began",
    "during the long rains",
    "when the gates were opened",
    "by the end of the century",
)


def documents(name: str, *, count: int, size_bytes: int) -> list[Document]:
    """`count` documents of `size_bytes` each, different for each name, with scores from 0.95 down to above 0.5."""
    chance = random.Random(name)
    return [
        Document(
            title=f"{name}: the {chance.choice(_KINDS)} {chance.choice(_THINGS)}, part {number + 1}",
            content=_prose(chance, size_bytes),
            score=round(0.95 - 0.44 * number / count, 4),
        )
        for number in range(count)
    ]


def _prose(chance: random.Random, size_bytes: int) -> str:
    sentences: list[str] = []
    size = 0
    while size < size_bytes:
        sentences.append(_sentence(chance))
        size += len(sentences[-1]) + 1
    return " ".join(sentences)[: size_bytes - 1] + "."


def _sentence(chance: random.Random) -> str:
    kind, other = chance.sample(_KINDS, 2)
    thing, second = chance.sample(_THINGS, 2)
    return (
        f"The {kind} {thing} of the {chance.choice(_PLACES)} {chance.choice(_DEEDS)} {chance.randint(2, 980)} "
        f"cubic metres a second past the {other} {second} {chance.choice(_WHEN)}."
    )
