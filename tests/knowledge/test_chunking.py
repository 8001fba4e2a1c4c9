"""Documents in pieces: what every piece promises, and how they read."""

import asyncio
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.contracts import Embedder
from anabranch.knowledge.chunking import LONG_SPACE, chunk, effective
from anabranch.knowledge.ingest import recipe_of
from anabranch.knowledge.model import Block, BlockKind, Chunking, Parsed, Piece, Strategy
from anabranch.models.minilm import MiniLM
from anabranch.testing import FakeEmbedder
from anabranch.testing.source import documents
from anabranch.text.sentences import sentences
from support.examples import examples

STRATEGIES: tuple[Strategy, ...] = ("fixed", "sentence", "semantic")
KINDS: tuple[BlockKind, ...] = ("paragraph", "heading", "code", "table", "list")


def parsed(*parts: tuple[BlockKind, str] | tuple[BlockKind, str, int], between: str = "\n\n") -> Parsed:
    """Parts in order, with blank lines between; a heading's depth is its number of #s, a third value is the page."""
    text = ""
    blocks: list[Block] = []
    headers: tuple[str, ...] = ()
    for kind, content, *page in parts:
        if kind == "heading":
            depth = len(content) - len(content.lstrip("#"))
            headers = (*headers[: max(depth - 1, 0)], content.lstrip("# ").strip())
        start = len(text)
        text += content
        place = page[0] if page else None
        blocks.append(Block(start=start, end=len(text), kind=kind, headers=headers, page=place))
        text += between
    return Parsed(text=text, blocks=tuple(blocks))


def pieces(document: Parsed, embedder: Embedder | None = None, **chunking: object) -> tuple[Piece, ...]:
    return asyncio.run(chunk(document, Chunking(**chunking), embedder or FakeEmbedder()))  # type: ignore[arg-type]


def read(document: Parsed, found: Sequence[Piece]) -> list[str]:
    return [document.text[piece.start : piece.end] for piece in found]


def prose(name: str, size_bytes: int) -> str:
    return documents(name, count=1, size_bytes=size_bytes)[0].content


words = st.sampled_from(
    [
        "river",
        "The",
        "Dr.",
        "e.g.",
        "end.",
        "No!",
        "a",
        "Donaudampfschifffahrt",
        "3.14",
        "水。",
        "我喜欢河流",
        "e\u0301",
        "- ",
        "1. ",
    ]
)
visible = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.sampled_from("ab .,\n\t\u0301\u200d👍🏽水。x\x1c"), max_size=80),
    st.lists(words, max_size=60).map(" ".join),
    st.lists(words, max_size=60).map("\n".join),
    st.integers(1, 400).map(lambda count: "x" * count),
    st.integers(900, 3_000).map(lambda count: f"Herons eat{' ' * count}fish{' ' * 1_200}too."),
    st.builds(lambda some, times: " ".join(some * times), st.lists(words, min_size=1, max_size=30), st.integers(1, 40)),
    st.builds(prose, st.sampled_from("abcdef"), st.integers(100, 6000)),
)


@st.composite
def parsings(draw: st.DrawFn) -> Parsed:
    parts: list[tuple[BlockKind, str, int]] = []
    page = 1
    for _ in range(draw(st.integers(0, 8))):
        page += draw(st.integers(0, 1))
        kind = draw(st.sampled_from(KINDS))
        content = draw(st.text(alphabet="#ab c", max_size=20) if kind == "heading" else visible)
        parts.append((kind, content, page))
    return parsed(*parts, between=draw(st.sampled_from(["\n", "\n\n", " "])))


def promises(document: Parsed, chunking: Chunking, embedder: Embedder) -> tuple[Piece, ...]:
    found = asyncio.run(chunk(document, chunking, embedder))
    sizes = effective(chunking, embedder)
    text = document.text
    covered = bytearray(len(text))
    before: Piece | None = None
    for piece in found:
        content = text[piece.start : piece.end]
        assert content
        assert content == content.strip()
        assert piece.tokens == len(embedder.tokens(content))
        assert piece.tokens <= sizes.size or len(content) == 1
        block = next(block for block in document.blocks if block.start <= piece.start < block.end)
        within = [
            one
            for one in document.blocks
            if one.end > piece.start and one.start < piece.end and text[one.start : one.end].strip()
        ]
        bodies = [one for one in within if one.kind != "heading"] or within
        assert all(one.headers[: len(piece.headers)] == piece.headers for one in bodies)
        deeper = {one.headers[: len(piece.headers) + 1] for one in bodies}
        assert len(deeper) > 1 or deeper == {piece.headers}
        assert piece.page == block.page
        covered[piece.start : piece.end] = b"\x01" * len(content)
        if before is not None:
            assert before.start < piece.start
            assert before.end < piece.end
            if piece.start < before.end:
                assert len(embedder.tokens(text[piece.start : before.end])) <= sizes.overlap
        before = piece
    for block in document.blocks:
        assert all(covered[at] or text[at].isspace() for at in range(block.start, block.end))
    return found


@settings(max_examples=examples(150), deadline=None)
@given(parsings(), st.sampled_from(STRATEGIES), st.integers(1, 600), st.data())
def test_every_chunking_strategy_covers_the_text_within_the_size(
    document: Parsed, strategy: Strategy, size: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, size))
    promises(document, Chunking(strategy=strategy, size=size, overlap=overlap), FakeEmbedder(window=512))


@settings(max_examples=examples(150), deadline=None)
@given(parsings(), st.sampled_from(STRATEGIES), st.integers(1, 12), st.data())
def test_every_chunking_strategy_works_with_tiny_sizes(
    document: Parsed, strategy: Strategy, size: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, size))
    promises(document, Chunking(strategy=strategy, size=size, overlap=overlap), FakeEmbedder())


@settings(max_examples=examples(100), deadline=None)
@given(parsings(), st.sampled_from(["sentence", "semantic"]), st.integers(30, 300), st.integers(0, 100))
def test_sentences_and_tables_that_fit_are_not_split(
    document: Parsed, strategy: Strategy, size: int, overlap: int
) -> None:
    embedder = FakeEmbedder(window=512)
    text = document.text
    found = promises(document, Chunking(strategy=strategy, size=size, overlap=overlap), embedder)
    headings = [block for block in document.blocks if block.kind == "heading"]
    # The last headings go with what is before them, which may not fit then.
    last = max((block.start for block in document.blocks if block.kind != "heading"), default=-1)
    for block in document.blocks:
        content = text[block.start : block.end].strip()
        if not content or block.start == last or block.kind in ("heading", "list"):
            continue
        whole = [(block.start, block.end)]
        for start, end in whole if block.kind in ("table", "code") else sentences(text, block.start, block.end):
            inner = text[start:end].strip()
            if re.search(rf"\s{{{LONG_SPACE}}}", inner):
                continue
            if len(embedder.tokens(inner)) <= size - sum(len(embedder.tokens(text[h.start : h.end])) for h in headings):
                at = text.index(inner, start)
                assert any(piece.start <= at and at + len(inner) <= piece.end for piece in found)


@settings(max_examples=examples(100), deadline=None)
@given(parsings(), st.sampled_from(["sentence", "semantic"]), st.integers(0, 100))
def test_a_heading_is_never_a_chunk_of_its_own(document: Parsed, strategy: Strategy, overlap: int) -> None:
    found = pieces(document, FakeEmbedder(window=512), strategy=strategy, size=400, overlap=overlap)
    bodies = [
        block for block in document.blocks if block.kind != "heading" and document.text[block.start : block.end].strip()
    ]
    for piece in found:
        assert not bodies or any(piece.start < body.end and body.start < piece.end for body in bodies)
        assert (piece.kind == "heading") == (not bodies)


def test_chunk_size_and_overlap_are_limited_by_the_embedder() -> None:
    embedder = FakeEmbedder(window=256)
    assert effective(Chunking(size=512, overlap=50), embedder) == Chunking(size=256, overlap=50)
    assert effective(Chunking(size=100, overlap=90), embedder) == Chunking(size=100, overlap=50)
    assert effective(Chunking(size=0, overlap=-1), embedder) == Chunking(size=1, overlap=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_text_has_no_chunks(strategy: Strategy) -> None:
    assert pieces(Parsed(text="", blocks=()), strategy=strategy) == ()
    assert pieces(parsed(("paragraph", " \n ")), strategy=strategy) == ()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_short_document_is_one_chunk_and_is_not_embedded(strategy: Strategy) -> None:
    document = parsed(("heading", "# Leave"), ("paragraph", "Everybody has 30 days. Ask early."))
    embedder = FakeEmbedder()
    [piece] = pieces(document, embedder, strategy=strategy)
    assert read(document, [piece]) == ["# Leave\n\nEverybody has 30 days. Ask early."]
    assert (piece.headers, piece.kind) == (("Leave",), "paragraph")
    assert embedder.calls == []


HANDBOOK = parsed(
    ("heading", "# Handbook"),
    ("heading", "## Leave"),
    ("paragraph", prose("leave", 1500)),
    ("heading", "## Pay"),
    ("paragraph", prose("pay", 600)),
    ("heading", "## Keys"),
    ("paragraph", "Ask the porter."),
    ("heading", "## Bicycles"),
    ("paragraph", "They stand in the yard."),
    ("heading", "## Travel"),
    ("paragraph", prose("travel", 700)),
    ("heading", "## Index"),
)


@pytest.mark.parametrize("strategy", ["sentence", "semantic"])
def test_a_handbook_is_cut_at_its_sections(strategy: Strategy) -> None:
    found = pieces(HANDBOOK, strategy=strategy, size=256, overlap=40)
    contents = read(HANDBOOK, found)
    assert [piece.headers[-1] for piece in found] == ["Leave", "Leave", "Pay", "Keys", "Bicycles", "Travel"]
    assert found[2].headers == ("Handbook", "Pay")
    assert contents[0].startswith("# Handbook\n\n## Leave\n\nThe ")
    assert contents[2].startswith("## Pay\n\nThe ")
    assert contents[3:5] == ["## Keys\n\nAsk the porter.", "## Bicycles\n\nThey stand in the yard."]
    assert contents[5].endswith("\n\n## Index")
    assert all(content.endswith(".") for content in contents[:-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_table_is_not_under_the_heading_of_another_section(strategy: Strategy) -> None:
    document = parsed(
        ("heading", "# Travel"),
        ("heading", "## Hotels"),
        ("paragraph", "The Lark has a garden."),
        ("heading", "## Trains"),
        ("table", "| from | to |\n|---|---|\n| Bern | Basel |"),
    )
    found = pieces(document, strategy=strategy)
    if strategy == "fixed":  # these windows do not depend on the text
        assert [piece.headers for piece in found] == [("Travel",)]
    else:
        assert [piece.headers for piece in found] == [("Travel", "Hotels"), ("Travel", "Trains")]
        assert [piece.kind for piece in found] == ["paragraph", "table"]


def test_sentences_are_packed_to_the_size_and_the_last_whole_ones_repeated() -> None:
    document = parsed(("paragraph", prose("overlap", 6000)))
    found = pieces(document, strategy="sentence", size=128, overlap=40)
    ends = {end for _, end in sentences(document.text)}
    begins = {start for start, _ in sentences(document.text)}
    assert all(piece.start in begins and piece.end in ends and piece.tokens > 90 for piece in found[:-1])
    for before, after in pairwise(found):
        repeated = len(FakeEmbedder().tokens(document.text[after.start : before.end]))
        assert 15 < repeated <= 40


def test_a_sentence_that_introduces_a_list_is_in_the_chunk_of_its_first_item() -> None:
    document = parsed(
        ("paragraph", "one two three four five six. These are left out:"),
        ("list", "- api keys and tokens\n- passwords"),
    )
    assert read(document, pieces(document, strategy="sentence", size=10, overlap=0)) == [
        "one two three four five six.",
        "These are left out:\n\n- api keys and tokens",
        "- passwords",
    ]


def test_fixed_windows_are_full_and_begin_and_end_between_words() -> None:
    document = parsed(("paragraph", prose("fixed", 6000)))
    found = pieces(document, strategy="fixed", size=128, overlap=32)
    for piece in found[:-1]:
        assert 124 <= piece.tokens <= 128
        assert document.text[piece.end : piece.end + 1] in (" ", "")
    for before, after in pairwise(found):
        assert document.text[after.start - 1] == " "
        assert 28 <= len(FakeEmbedder().tokens(document.text[after.start : before.end])) <= 32


CATS = "The cat of the house sleeps near the warm stove, and cat hair covers the old chair of the house. "
TAXES = "Income tax rates rose when parliament voted new tax law, so income owed under tax law rose again. "


BEES = (
    "A colony of honey bees lives through the winter on what it stored in summer. The workers form a tight cluster "
    "around the queen and shiver to keep her warm. When it is cold outside, the bees at the edge of the cluster change "
    "places with those inside. They eat honey from the combs above them and move slowly upwards. A beekeeper lifts the "
    "hive in autumn to feel by its weight whether there is honey enough. If it is too light, the bees are fed with "
    "sugar syrup before the frost. In spring the queen lays eggs again, and the first workers fly out for pollen."
)
BRIDGES = (
    "A suspension bridge carries its deck on vertical hangers below two main cables. The cables run over the tops of "
    "the towers and end in heavy anchorages of concrete. Steel wire is spun across the gap strand by strand until a "
    "cable has its full thickness. Wind is the load that worries the engineer most, because a light deck can begin to "
    "twist. Stiffening trusses below the roadway keep the deck from swinging. Each hanger can be replaced while "
    "traffic goes on over the bridge. Inspectors open the wrapped cable every few years and look for broken wires."
)


def test_a_topic_begins_the_next_chunk_and_is_not_repeated() -> None:
    document = parsed(("paragraph", (CATS * 7 + TAXES * 7).strip()))
    found = pieces(document, strategy="semantic", size=256, overlap=50)
    assert read(document, found) == [(CATS * 7).strip(), (TAXES * 7).strip()]


def test_the_embedder_says_where_a_topic_ends() -> None:
    document = parsed(("paragraph", (CATS * 7 + TAXES * 7).strip()))
    usual = FakeEmbedder(window=512)
    calibration = msgspec.structs.replace(usual.calibration, topic_threshold=-1.0)
    patient = FakeEmbedder(window=512, calibration=calibration)
    assert [len(pieces(document, one, strategy="semantic", size=512)) for one in (usual, patient)] == [2, 1]


def test_only_another_topic_threshold_changes_the_recipe_of_documents() -> None:
    """Documents with the same bytes and the same recipe are not chunked again."""
    usual = FakeEmbedder()
    other = FakeEmbedder(calibration=msgspec.structs.replace(usual.calibration, topic_threshold=0.5))
    assert recipe_of(Chunking(), usual) == "3/semantic/512/50/fake-128"
    assert recipe_of(Chunking(), other) == "3/semantic/512/50/fake-128/topics 0.5"
    assert recipe_of(Chunking(strategy="sentence"), other) == recipe_of(Chunking(strategy="sentence"), usual)


def test_a_topic_that_is_too_short_does_not_break() -> None:
    document = parsed(("paragraph", (CATS * 7 + TAXES * 2).strip()))
    assert len(pieces(document, strategy="semantic", size=256)) == 1


def test_a_topic_that_is_too_long_is_split_evenly_with_overlap() -> None:
    document = parsed(("paragraph", (CATS * 11 + TAXES * 7).strip()))
    embedder = FakeEmbedder(window=200)
    first, second, third = pieces(document, embedder, strategy="semantic", size=200, overlap=30)
    assert second.start < first.end
    assert second.tokens >= 100
    assert second.end < third.start
    assert document.text[third.start : third.end] == (TAXES * 7).strip()
    assert [len(texts) for texts in embedder.calls] == [18]


def test_the_page_of_a_chunk_is_where_it_begins() -> None:
    parts = [("paragraph", prose(f"page {page}", 700), page) for page in range(1, 6)]
    document = parsed(*parts)  # type: ignore[arg-type]
    for strategy in STRATEGIES:
        found = promises(document, Chunking(strategy=strategy, size=200, overlap=20), FakeEmbedder())
        assert found[0].page == 1
        assert found[-1].page == 5


def test_a_table_is_kept_whole_if_it_fits_and_is_else_split_on_lines() -> None:
    rows = [f"| {number} | gauge {number} | {number * 3} m |" for number in range(200)]
    small, large = "\n".join(rows[:20]), "\n".join(rows)
    document = parsed(("paragraph", prose("before", 600)), ("table", small), ("paragraph", prose("after", 600)))
    for strategy in ("sentence", "semantic"):
        found = pieces(document, strategy=strategy, size=256)
        assert any(small in content for content in read(document, found))
        assert "table" in [piece.kind for piece in found]
        found = pieces(parsed(("table", large)), strategy=strategy, size=256, overlap=0)
        assert [line for content in read(parsed(("table", large)), found) for line in content.split("\n")] == rows
        assert {piece.kind for piece in found} == {"table"}


def test_a_list_is_split_between_its_items() -> None:
    entries = [f"- Item {number} of the list. It has two sentences." for number in range(60)]
    document = parsed(("list", "\n".join(entries)))
    found = pieces(document, strategy="sentence", size=100, overlap=0)
    assert [line for content in read(document, found) for line in content.split("\n")] == entries
    assert {piece.kind for piece in found} == {"list"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_enormous_sentence_is_split_between_words(strategy: Strategy) -> None:
    text = "and so on " * 700
    document = parsed(("paragraph", text))
    found = promises(document, Chunking(strategy=strategy, size=256, overlap=20), FakeEmbedder())
    assert all(set(content.split()) == {"and", "so", "on"} for content in read(document, found))
    assert min(piece.tokens for piece in found) > (200 if strategy != "fixed" else 0)
    assert len(found) in (9, 10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_enormous_word_is_split_inside(strategy: Strategy) -> None:
    document = parsed(("paragraph", "A word: " + "x" * 10_000 + " and the end."))
    found = promises(document, Chunking(strategy=strategy, size=100, overlap=10), FakeEmbedder())
    assert 17 <= len(found) <= 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_grapheme_clusters_are_not_split(strategy: Strategy) -> None:
    family = "👩\u200d👩\u200d👧"
    document = parsed(("paragraph", "e\u0301" * 200 + family * 60))
    for content in read(document, pieces(document, strategy=strategy, size=9, overlap=0)):
        assert not content.replace("e\u0301", "").replace(family, "")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chinese_is_split_between_sentences_or_characters(strategy: Strategy) -> None:
    text = "河流在平原上分成许多支流然后重新汇合。" * 60
    document = parsed(("paragraph", text))
    found = promises(document, Chunking(strategy=strategy, size=64, overlap=8), FakeEmbedder())
    assert len(found) > 4
    if strategy != "fixed":
        assert all(content.endswith("。") for content in read(document, found))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_document_with_only_headings_has_chunks(strategy: Strategy) -> None:
    document = parsed(("heading", "# One"), ("heading", "## Two"), ("heading", "# Three"))
    [piece] = pieces(document, strategy=strategy)
    assert (piece.kind, piece.headers) == ("heading", ())


def test_a_word_that_the_tokenizer_does_not_know_does_not_make_one_enormous_chunk() -> None:
    class Unknowing(FakeEmbedder):
        def tokens(self, text: str) -> Sequence[tuple[int, int]]:
            spans = [(found.start(), found.end()) for found in re.finditer(r"\S+", text)]
            return [
                part for a, b in spans for part in ([(a, b)] if b - a > 100 else [(at, at + 1) for at in range(a, b)])
            ]

    document = parsed(("paragraph", "known " + "0123456789abcdef" * 10_000))
    for strategy in STRATEGIES:
        found = promises(document, Chunking(strategy=strategy, size=256, overlap=20), Unknowing())
        assert max(piece.end - piece.start for piece in found) < 256 * 10


def test_chunking_takes_little_time() -> None:
    document = parsed(*[("paragraph", prose(f"part {part}", 1000)) for part in range(25)])
    embedder = FakeEmbedder()
    best = 1.0
    for _ in range(5):
        began = time.process_time()
        pieces(document, embedder, strategy="sentence", size=256, overlap=50)
        best = min(best, time.process_time() - began)
    assert best < 0.05


@pytest.mark.parametrize(
    "text", ["x" * 300_000, "水" * 300_000, "a.b" * 100_000, "a. " * 100_000, "\n".join("ab" * 75_000)]
)
@pytest.mark.parametrize("strategy", ["fixed", "sentence"])
def test_chunking_pathological_text_is_fast(strategy: Strategy, text: str) -> None:
    began = time.process_time()
    assert pieces(parsed(("paragraph", text)), strategy=strategy)
    assert time.process_time() - began < 5


@pytest.fixture(scope="module")
def minilm(models_dir: Path) -> MiniLM:
    return MiniLM(models_dir)


@settings(max_examples=examples(40), deadline=None)
@given(parsings(), st.sampled_from(["fixed", "sentence"]), st.integers(1, 300), st.data())
def test_chunking_with_minilm_covers_the_text_within_the_size(
    minilm: MiniLM, document: Parsed, strategy: Strategy, size: int, data: st.DataObject
) -> None:
    promises(document, Chunking(strategy=strategy, size=size, overlap=data.draw(st.integers(0, size))), minilm)


def test_minilm_tells_two_topics_apart(minilm: MiniLM) -> None:
    document = parsed(("paragraph", f"{BEES} {BRIDGES}"))
    found = promises(document, Chunking(strategy="semantic"), minilm)
    assert read(document, found) == [BEES, BRIDGES]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("space", [" " * 300_000, "\n" * 300_000, " \t" * 70_000 + "\n" * 70_000])
def test_no_chunk_has_long_white_space(strategy: Strategy, space: str) -> None:
    document = parsed(("paragraph", f"Herons eat fish.{space}Otters eat fish, too,{space}and so do seals.{space}Why?"))
    found = read(document, pieces(document, strategy=strategy))
    assert max(map(len, found)) < 2 * LONG_SPACE
    assert "".join("".join(found).split()) == "".join(document.text.split())
