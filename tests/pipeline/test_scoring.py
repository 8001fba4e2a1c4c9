"""How results are ranked: what each part is worth, that they add up, and that no word of the question is missed."""

import math
import random
import time
from collections import Counter

import pytest
import Stemmer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.domain.model import Passage, SourceReply, Status
from anabranch.domain.ranking import NEUTRAL, Breakdown, Ranking, Weights
from anabranch.pipeline.scoring import MAX_TERMS, WORD, Ranker, Terms, folded
from support.examples import examples

DAY = 86_400.0
NOW = 20_000 * DAY
ONLY_WORDS = Weights(keyword_match=1, freshness=0, server_reputation=0, length_penalty=0)
_ENDINGS = """
s es ed ing ly edly ingly eed ied ies y ational ation ator alism ality ally fulness ously ousness iveness ivity bility
ability ibility bly ably ogy ogist fully lessly alize icate icity ical tional ency ancy ently izer ization ative ness
ful al ance ence er ic able ible ant ement ment ism ate ity ous ive ize ion e ll ss ying ie ble 's _x 7
"""
_IRREGULAR = """
die dying dies died dyed lie lying tie tying vie vying sky skies skis ski use using used city cities news new howe atlas
cosmos bias andes idly gently ugly early only singly inning outing canning herring earring evening succeed proceed able
ability abilities possible possibility possibly hop hope hoping hopping agree agreed feed yes say by y o
"""
_SIGNS = "水 の 川本 abc川 川abc é École ﬁles ÇA 한국 \U0001d401old naïve straße İstanbul _"
ENDINGS, IRREGULAR, SIGNS = ["", *_ENDINGS.split()], _IRREGULAR.split(), _SIGNS.split()
roots = st.text("abcdeghilnorstuvyz", max_size=6)
words = st.one_of(
    st.sampled_from(IRREGULAR),
    st.sampled_from(SIGNS),
    st.builds(lambda root, one, other: root + one + other, roots, st.sampled_from(ENDINGS), st.sampled_from(ENDINGS)),
    st.text(max_size=5),
)
texts = st.lists(words, max_size=30).flatmap(
    lambda chosen: st.sampled_from([" ", "", "-", "\n"]).map(lambda between: between.join(chosen))
)


def counted(question: str, text: str) -> dict[str, int]:
    """The definition: every word of the text, stemmed."""
    stem = Stemmer.Stemmer("english").stemWord
    wanted = Terms(question).stems
    return {one: n for one, n in Counter(stem(word) for word in WORD.findall(folded(text))).items() if one in wanted}


@settings(max_examples=examples(300))
@given(texts, texts)
def test_keyword_match_finds_every_inflection(question: str, text: str) -> None:
    assert Terms(question).count(f"{text} {question}") == counted(question, f"{text} {question}")


@pytest.mark.parametrize("word", IRREGULAR)
def test_keyword_match_finds_irregular_stems(word: str) -> None:
    everything = " ".join(IRREGULAR)
    assert Terms(word).count(everything) == counted(word, everything) != {}


def test_every_stem_is_how_its_words_begin() -> None:
    """Roots and endings at random, far more than the property can try."""
    chance = random.Random(1)
    stem = Stemmer.Stemmer("english").stemWord
    for _ in range(300):
        some = ["".join(chance.choices("aeioudblnrtsvgy", k=chance.randrange(6))) for _ in range(20)]
        made = [root + chance.choice(ENDINGS) + chance.choice(ENDINGS) for root in some]
        made = [word for word in made if word.isalpha()]
        counts = Terms(" ".join(made)).count(" ".join(made))
        assert counts == {one: n for one, n in Counter(map(stem, made)).items() if one in counts}
        assert set(counts) == set(Terms(" ".join(made)).stems)


def passage(text: str, source: str = "a", title: str = "", date: float | None = None) -> Passage:
    return Passage(source=source, title=title, text=text, score=0.0, date=date)


def reply(*passages: Passage, path: str = "a") -> SourceReply:
    return SourceReply(path=path, status=Status.SUCCESS, passages=passages)


def ranked(question: str, ranking: Ranking, *replies: SourceReply) -> tuple[Passage, ...]:
    ranker = Ranker(question, ranking)
    for index, each in enumerate(replies):
        ranker.read(index, each)
    return ranker.ranked()


def parts(question: str, ranking: Ranking, *passages: Passage) -> list[Breakdown]:
    """In the order given."""
    by_text = {one.text: one.breakdown for one in ranked(question, ranking, reply(*passages))}
    return [found for one in passages if (found := by_text[one.text])]


def test_rare_terms_count_more_and_repeats_ever_less() -> None:
    found = parts(
        "What is the river's delta?",
        Ranking(),
        passage("rivers delta"),
        passage("river, river, rivers"),
        passage("sea"),
    )
    river, delta = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    whole = river + delta
    expected = [(river + delta) / 2 / whole, river * 3 / 4 / whole, 0.0]
    assert [one.keyword_match for one in found] == [pytest.approx(value, abs=1e-6) for value in expected]


def test_a_title_counts_like_text() -> None:
    titled, other = parts("delta", Ranking(), passage("x", title="Delta"), passage("delta"))
    assert titled.keyword_match == other.keyword_match == 0.5


def test_stop_words_count_only_where_there_is_nothing_else() -> None:
    assert Terms("what is the matter").stems == ("matter",)
    assert Terms("to be or not to be").stems == ("to", "be", "or", "not")
    assert Terms("?!").stems == ()
    assert len(Terms(" ".join(f"word{n}" for n in range(2_000))).stems) == MAX_TERMS


def test_keyword_match_folds_accents_and_splits_ideographs() -> None:
    assert Terms("Écoles 水").count("ecole ÉCOLE 山水川 水abc abc水") == {"ecol": 2, "水": 3}


@pytest.mark.parametrize(
    ("date", "freshness"),
    [
        (NOW, 1.0),
        (NOW - 90 * DAY, 0.5),
        (NOW - 180 * DAY, 0.25),
        (NOW + DAY, 1.0),
        (-1e308, 0.0),
        (None, NEUTRAL),
        (math.nan, NEUTRAL),
        (math.inf, NEUTRAL),
        (-math.inf, NEUTRAL),
    ],
)
def test_freshness_halves_after_a_half_life(date: float | None, freshness: float) -> None:
    assert parts("q", Ranking(now=NOW), passage("t", date=date))[0].freshness == freshness


def test_reputation_comes_from_the_source_or_is_neutral() -> None:
    ranking = Ranking(reputations={"a": 0.9, "high": 7.0, "low": -1.0, "odd": math.nan})
    found = parts("q", ranking, *(passage(name, source=name) for name in ("a", "b", "high", "low", "odd")))
    assert [one.server_reputation for one in found] == [0.9, NEUTRAL, 1.0, 0.0, NEUTRAL]


def test_length_penalty_applies_to_long_texts_only() -> None:
    found = parts("q", Ranking(), *(passage("x" * length) for length in (0, 2_000, 4_000, 2_000_000)))
    assert [one.length_penalty for one in found] == [1.0, 1.0, 0.5, 0.001]


def test_ranking_without_results_is_empty() -> None:
    failed = SourceReply(path="a", status=Status.ERROR, error="It broke.")
    assert ranked("q", Ranking()) == ranked("q", Ranking(), failed) == ()


def test_equals_stand_as_their_sources_have_them_and_then_by_source() -> None:
    first = reply(passage("a1", "a"), passage("a2", "a"))
    second = reply(passage("b1", "b"), passage("b2", "b"), path="b")
    assert [one.text for one in ranked("q", Ranking(), first, second)] == ["a1", "b1", "a2", "b2"]
    scored = ranked("delta", Ranking(weights=ONLY_WORDS), first, reply(passage("z"), passage("delta")))
    assert [one.text for one in scored] == ["delta", "a1", "z", "a2"]


anything = st.floats(allow_nan=True, allow_infinity=True)
found = st.builds(
    passage, st.text(max_size=40) | texts, st.sampled_from(["a", "b", "c"]), texts, st.none() | anything | st.just(NOW)
)
weights = st.builds(
    Weights,
    keyword_match=st.floats(0.001, 9),
    freshness=st.floats(0, 9),
    server_reputation=st.floats(0, 9),
    length_penalty=st.floats(0, 9),
)
rankings = st.builds(
    Ranking,
    weights=weights,
    now=st.just(NOW) | anything,
    half_life_s=st.floats(1e-9, 1e12) | anything,
    reputations=st.dictionaries(st.sampled_from(["a", "b"]), anything),
)


@given(texts, rankings, st.lists(st.lists(found, max_size=4), max_size=4), st.randoms(use_true_random=False))
def test_the_parts_add_up_whatever_arrives_in_whatever_order(
    question: str, ranking: Ranking, sources: list[list[Passage]], chance: random.Random
) -> None:
    replies = [(index, reply(*passages)) for index, passages in enumerate(sources)]
    best = ranked(question, ranking, *(one for _, one in replies))
    for one in best:
        assert one.breakdown is not None
        added = one.breakdown.weighted(ranking.weights.shares)
        values = (added.keyword_match, added.freshness, added.server_reputation, added.length_penalty)
        assert 0 <= one.score <= 1
        assert one.score == added.total == round(sum(values), 6)
        assert all(0 <= value <= 1 for value in values)
    assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)
    chance.shuffle(replies)
    again = Ranker(question, ranking)
    for index, each in replies:
        again.read(index, each)
    # As text: a date that is not a number is not even the same as itself.
    assert repr(again.ranked()) == repr(best)


@given(weights)
@example(Weights(keyword_match=1.0000006, freshness=1.0000006, server_reputation=1.0000006, length_penalty=0.9999982))
def test_rounded_parts_are_never_more_than_1_together(some: Weights) -> None:
    full = Breakdown(keyword_match=1, freshness=1, server_reputation=1, length_penalty=1)
    assert 0.999997 <= full.weighted(some.shares).total <= 1


def test_hostile_text_is_read_in_the_time_of_its_length() -> None:
    """Thousands of marks on one letter take the standard library seconds to put in order, and one sign may stand for
    eighteen letters."""
    started = time.process_time()
    ranked("é", Ranking(), reply(*(passage("\ufdfa" * 20_000) for _ in range(50))))
    ranked("é", Ranking(), reply(*(passage("e" + "\u0301\u0316" * 10_000) for _ in range(20))))
    ranked(" ".join(f"a{n}b" for n in range(2_000)), Ranking(), reply(passage("a1 " * 7_000), passage("a" * 20_000)))
    assert time.process_time() - started < 1
