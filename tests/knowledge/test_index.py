"""The index against its plain definitions: BM25 word by word, exact search, merges that change nothing."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.knowledge.index.segment import K1, MIN_BINARY_ROWS, B, BinaryVectors, Postings, Segment
from anabranch.knowledge.index.writer import FAN, plan
from anabranch.text.words import terms
from support.examples import examples

pytestmark = pytest.mark.segments

texts = st.lists(st.lists(st.integers(1, 12), max_size=12), min_size=1, max_size=12)
masks = st.lists(st.booleans(), min_size=12, max_size=12)


def bm25(texts: Sequence[Sequence[int]], query: Sequence[int], row: int) -> float:
    """As the textbook has it."""
    average = sum(map(len, texts)) / len(texts) or 1.0
    total = 0.0
    for term in dict.fromkeys(query):
        holding = sum(term in text for text in texts)
        often = Counter(texts[row])[term]
        if often:
            weight = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            total += weight * often * (K1 + 1) / (often + K1 * (1 - B + B * len(texts[row]) / average))
    return total


def weights(texts: Sequence[Sequence[int]], query: Sequence[int]) -> list[tuple[int, float]]:
    found = []
    for term in dict.fromkeys(query):
        holding = sum(term in text for text in texts)
        if holding:
            found.append((term, math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))))
    return found


@given(texts, st.lists(st.integers(1, 14), max_size=6), masks)
def test_bm25_scores_equal_the_formula(texts: list[list[int]], query: list[int], chosen: list[bool]) -> None:
    mask = np.array(chosen[: len(texts)])
    average = sum(map(len, texts)) / len(texts) or 1.0
    built = Postings.build(texts)
    spans = [(*built.span(term), weight) for term, weight in weights(texts, query)]
    scored = built.score(spans, built.norms(average), mask)
    for row in range(len(texts)):
        expected = bm25(texts, query, row) if mask[row] else 0.0
        assert scored.scores[row] == pytest.approx(expected, abs=1e-4)
    rows, scores = scored.best(5)
    assert list(scores) == sorted(scores, reverse=True)
    assert all(mask[row] for row in rows)


@given(st.lists(texts, min_size=1, max_size=4), st.data())
def test_merged_postings_equal_postings_of_the_kept_rows(parts: list[list[list[int]]], data: st.DataObject) -> None:
    kept = [np.array(data.draw(st.lists(st.booleans(), min_size=len(p), max_size=len(p)))) for p in parts]
    merged = Postings.merge([Postings.build(part) for part in parts], kept)
    survivors = [text for part, keep in zip(parts, kept, strict=True) for text, k in zip(part, keep, strict=True) if k]
    expected = Postings.build(survivors) if survivors else Postings.build([])
    assert same(merged, expected)


def same(one: Postings, other: Postings) -> bool:
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(one, other, strict=True))


def unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return unit(np.random.default_rng(7).standard_normal((3_000, 384)))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01, 0.0])
def test_nearest_vectors_equal_an_exact_search(vectors: np.ndarray, share: float) -> None:
    chance = np.random.default_rng(3)
    mask = chance.random(len(vectors)) < share
    segment = Segment.build(range(10, 10 + len(vectors)), vectors, [[]] * len(vectors))
    found = 0
    for query in unit(chance.standard_normal((20, 384))):
        rows, scores = segment.nearest(query, 10, None if share == 1.0 else mask)
        allowed = np.flatnonzero(mask) if share < 1.0 else np.arange(len(vectors))
        exact = allowed[np.argsort(-(vectors[allowed] @ query))[:10]]
        assert set(rows) <= set(allowed)
        assert len(rows) == min(10, len(allowed))
        assert np.allclose(scores, vectors[rows] @ query, atol=1e-5)
        found += len(set(rows) & set(exact))
    assert found >= 0.99 * 20 * min(10, int(mask.sum()) if share < 1 else 10)


def test_a_mapped_segment_equals_the_one_in_memory(vectors: np.ndarray, tmp_path: Path) -> None:
    segment = Segment.build(range(5, 55), vectors[:50], [terms(f"word{i} shared words") for i in range(50)])
    segment.write(tmp_path / "one")
    mapped = Segment.map(tmp_path / "one", 384)
    assert np.array_equal(mapped.keys, segment.keys)
    assert np.array_equal(mapped.vectors, segment.vectors)
    assert same(mapped.words, segment.words)
    assert list(mapped.nearest(vectors[3], 5, None)[0]) == list(segment.nearest(vectors[3], 5, None)[0])


def test_an_empty_segment_can_be_written_and_searched(tmp_path: Path) -> None:
    segment = Segment.merge([Segment.build([1], np.ones((1, 8), np.float32), [[1]])], [np.zeros(1, bool)])
    assert len(segment) == 0
    segment.write(tmp_path / "none")
    assert len(Segment.map(tmp_path / "none", 8).nearest(np.ones(8, np.float32), 3, None)[0]) == 0


def clustered(count: int) -> np.ndarray:
    chance = np.random.default_rng(11)
    centres = chance.standard_normal((400, 128))
    return unit(centres[chance.integers(0, 400, count)] + 0.5 * chance.standard_normal((count, 128)))


def test_binary_vectors_lose_nothing_that_an_exact_search_finds(tmp_path: Path) -> None:
    vectors = clustered(MIN_BINARY_ROWS)
    segment = Segment.build(range(len(vectors)), vectors, [[]] * len(vectors))
    segment.binary = BinaryVectors.of(vectors)
    assert segment.binary is not None
    segment.write(tmp_path / "one")
    mapped = Segment.map(tmp_path / "one", 128, max_gathered=1_000)
    assert mapped.binary is not None
    assert mapped.binary.second_pass == segment.binary.second_pass < len(vectors) // 8
    for share in (1.0, 0.5, 0.25, 0.1):
        chance = np.random.default_rng(1)
        mask = chance.random(len(vectors)) < share
        hits = 0
        for query in unit(vectors[:50] + 0.05 * chance.standard_normal((50, 128))):
            rows, _ = mapped.nearest(query, 10, None if share == 1.0 else mask)
            assert share == 1.0 or mask[rows].all()
            scores = vectors @ query if share == 1.0 else np.where(mask, vectors @ query, -2)
            hits += len(set(rows) & set(np.argsort(-scores)[:10]))
        assert hits >= 0.99 * 500, share


def test_random_vectors_get_no_binary_vectors() -> None:
    assert BinaryVectors.of(unit(np.random.default_rng(5).standard_normal((MIN_BINARY_ROWS, 256)))) is None


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 60), min_size=1, max_size=200))
def test_merge_plan_keeps_few_segments_with_few_rewrites(folds: list[int]) -> None:
    sizes: list[int] = []
    rewritten = 0
    for fold in folds:
        sizes.append(fold)
        begin = plan(sizes)
        if begin is not None:
            rewritten += sum(sizes[begin:])
            sizes = [*sizes[:begin], sum(sizes[begin:])]
    total = sum(folds)
    assert len(sizes) <= FAN * (math.log2(total) + 2)
    assert rewritten <= total * (math.log2(total) + 2)


def test_terms_are_case_folded_stemmed_and_without_stop_words() -> None:
    assert terms("The Cats, running!") == terms("cat runs")
    assert terms("Café naïve") == terms("cafe naive")
    assert terms("the of and") == []
    assert terms("the dog's bone") == terms("dog bone")
    assert len(terms("東京都の天気")) == 5
    assert terms("東京") == terms("東京都")[:1]
    assert terms("x" * 100_000) == []
    assert terms("snake_case") == terms("snake case")
