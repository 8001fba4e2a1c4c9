"""What the stages did to each passage on its way to the prompt: notes, and the value that is made of them."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from anabranch.domain.model import Passage

# In the order in which a passage comes to them.
Stage = Literal[
    "search",
    "near_duplicates",
    "rerank",
    "variety",
    "threshold",
    "limit",
    "source",
    "merge",
    "overlap",
    "evidence",
    "top_k",
    "guard",
    "budget",
    "prompt",
    "result",
]
STAGES: tuple[Stage, ...] = get_args(Stage)
# What tells passages apart: source, title, document and chunk.
Key = tuple[str, str, str | None, str]
# So many passages are listed, with so many characters of their texts and names.
MAX_EXPLAINED = 200
MAX_TEXT = 80
MAX_NAME = 200
DIGITS = 6


class PassageName(msgspec.Struct, frozen=True, kw_only=True):
    """`chunk_id` is that of the chunk in its collection; that of another source's passage identifies its text."""

    source: str
    title: str
    document_id: str | None = None
    chunk_id: str

    @property
    def key(self) -> Key:
        return self.source, self.title, self.document_id, self.chunk_id


class PassageStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one stage did to a passage. `rank` is its rank after the stage, from 1. `values` are those that the stage
    gave it or compared, by name. `note` says in words what the numbers do not; `other` is the passage that it was
    compared with. `left_out`: its way ends here."""

    stage: Stage
    rank: int | None = None
    values: Mapping[str, float] = {}
    note: str = ""
    other: PassageName | None = None
    left_out: bool = False


class ExplainedPassage(PassageName, frozen=True, kw_only=True):
    """A passage and its way. `text` is its beginning. `citation_index` is its number in the prompt and in the answer's
    marks; null if it is not in the prompt. `left_out` is the stage that left it out."""

    text: str
    steps: tuple[PassageStep, ...] = ()
    citation_index: int | None = None
    left_out: Stage | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Each passage's way: first those in the prompt, by number, then the others, those that came furthest first. `more`
    passages were left out that are not listed."""

    passages: tuple[ExplainedPassage, ...]
    more: int = 0


# Shared by all surfaces whose requests name it.
ExplainWanted = Annotated[
    bool,
    msgspec.Meta(
        description="Whether the response has an `explanation`: how each stage ranked each passage, and why others "
        "were left out"
    ),
]


class Notes:
    """Collects what stages do to the passages of one question. Where nobody asked for it there is none, and stages do
    nothing. A passage that its caller may not see must not be noted."""

    def __init__(self) -> None:
        self._passages: dict[Key, ExplainedPassage] = {}
        self._steps: dict[Key, list[PassageStep]] = {}
        self._more = 0

    def add(
        self,
        passage: "Passage | ExplainedPassage",
        stage: Stage,
        *,
        rank: int | None = None,
        note: str = "",
        other: "Passage | ExplainedPassage | None" = None,
        left_out: bool = False,
        **values: float | None,
    ) -> None:
        known = {name: round(value, DIGITS) for name, value in values.items() if value is not None}
        name = None if other is None else _name(explained(other))
        step = PassageStep(stage=stage, rank=rank, values=known, note=note, other=name, left_out=left_out)
        self._add(explained(passage), (step,))

    def repeats(
        self, passage: "Passage | ExplainedPassage", better: "Passage | ExplainedPassage", similarity: float
    ) -> None:
        """It is left out as a near-duplicate."""
        note = "near-duplicate of a passage with a higher rank"
        self.add(passage, "near_duplicates", other=better, note=note, left_out=True, similarity=similarity)

    def ranked(self, passages: "Iterable[Passage]", stage: Stage) -> None:
        """The stage has put the passages in this order."""
        for rank, passage in enumerate(passages, 1):
            self.add(passage, stage, rank=rank)

    def include(self, explanation: Explanation) -> None:
        """Add what another part of the way has noted."""
        for passage in explanation.passages:
            self._add(passage, passage.steps)
        self._more += explanation.more

    def explanation(self) -> Explanation:
        whole = sorted(self._whole(), key=_order)
        return Explanation(passages=tuple(whole[:MAX_EXPLAINED]), more=self._more + len(whole[MAX_EXPLAINED:]))

    def _add(self, passage: ExplainedPassage, steps: Iterable[PassageStep]) -> None:
        """A source may return a passage twice: equal steps are one."""
        self._passages.setdefault(passage.key, passage)
        own = self._steps.setdefault(passage.key, [])
        own += [step for step in steps if step not in own]

    def _whole(self) -> Iterator[ExplainedPassage]:
        for key, passage in self._passages.items():
            steps = tuple(self._steps[key])
            number = next((step.rank for step in steps if step.stage == "prompt"), None)
            left_out = next((step.stage for step in reversed(steps) if step.left_out), None)
            yield msgspec.structs.replace(
                passage, steps=steps, citation_index=number, left_out=left_out if number is None else None
            )


def chunk_id_of(passage: "Passage") -> str:
    """The id of its chunk; a passage of another source has one of its source and text."""
    if passage.place is not None:
        return passage.place.chunk_id
    text = f"{passage.source}\0{passage.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def explained(passage: "Passage | ExplainedPassage") -> ExplainedPassage:
    """The passage as an explanation names it."""
    if isinstance(passage, ExplainedPassage):
        return passage
    return named(passage.source, passage.title, passage.document_id, chunk_id_of(passage), passage.text)


def named(source: str, title: str, document_id: str | None, chunk_id: str, text: str) -> ExplainedPassage:
    """Names and text within their limits."""
    beginning = " ".join(text[: 4 * MAX_TEXT].split())
    return ExplainedPassage(
        source=source[:MAX_NAME],
        title=title[:MAX_NAME],
        document_id=None if document_id is None else document_id[:MAX_NAME],
        chunk_id=chunk_id,
        text=beginning[:MAX_TEXT],
    )


def _name(passage: ExplainedPassage) -> PassageName:
    return PassageName(
        source=passage.source, title=passage.title, document_id=passage.document_id, chunk_id=passage.chunk_id
    )


def _order(passage: ExplainedPassage) -> tuple[bool, int, int]:
    """Those in the prompt, then those that were kept, then those that were left out late."""
    if passage.citation_index is not None:
        return False, 0, passage.citation_index
    rank = next((step.rank for step in reversed(passage.steps) if step.rank is not None), 0)
    return True, -len(STAGES) if passage.left_out is None else -STAGES.index(passage.left_out), rank
