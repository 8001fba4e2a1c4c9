"""The fitted weights: probabilities, whatever the readings are."""

from hypothesis import given
from hypothesis import strategies as st

from anabranch.evidence.features import CLIP, UNREAD, SupportFeatures, UnitFeatures, clip
from anabranch.evidence.weights import (
    NEXT,
    SUPPORT,
    UNIT,
    NextFeatures,
    log_odds,
    probability_of_next,
    probability_of_support,
    probability_of_unit,
)

LOG_ODDS = st.floats(-CLIP, CLIP)
SHARE = st.floats(0, 1)
UNITS = st.builds(
    UnitFeatures, *[LOG_ODDS] * 3, *[SHARE] * 3, *[st.sampled_from([0.0, 1.0])] * (len(UnitFeatures._fields) - 6)
)


def test_there_is_a_weight_for_every_feature_and_a_bias() -> None:
    assert len(UNIT) == len(UnitFeatures._fields) + 1
    assert len(SUPPORT) == len(SupportFeatures._fields) + 2, "the best unit is one more"
    assert len(NEXT) == len(NextFeatures._fields) + 1


@given(UNITS)
def test_a_unit_that_the_model_is_surer_of_is_more_probable(unit: UnitFeatures) -> None:
    probability = probability_of_unit(unit)
    assert 0 <= probability <= 1
    for name in ("alone", "jointly", "words", "near"):
        higher = unit._replace(**{name: getattr(unit, name) + 0.1})
        assert probability_of_unit(higher) >= probability, name


@given(st.lists(st.floats(-1e9, 1e9), min_size=9, max_size=9), SHARE)
def test_support_is_a_probability_for_any_reading(values: list[float], best: float) -> None:
    assert 0 <= probability_of_support(SupportFeatures(*values), best) <= 1


def test_support_is_higher_where_the_model_finds_an_answer_and_the_passage_is_near() -> None:
    unread = SupportFeatures(*[*[UNREAD] * 6, 0.0, 1.0, 0.0])
    found = SupportFeatures(*[*[4.0] * 6, 0.7, 1.0, 0.7])
    assert probability_of_support(unread, 0.01) < 0.1
    assert probability_of_support(found, 0.95) > 0.9
    nearness = [probability_of_support(found._replace(near=near), 0.5) for near in (0.0, 0.2, 0.4, 0.8, 1.0)]
    assert nearness == sorted(nearness)


@given(st.builds(NextFeatures, st.floats(-9, 9), SHARE, SHARE, SHARE, SHARE))
def test_what_adds_words_of_the_question_is_rather_quoted_too(features: NextFeatures) -> None:
    probability = probability_of_next(features)
    assert 0 <= probability <= 1
    assert probability_of_next(features._replace(added=features.added + 0.1)) >= probability
    assert probability_of_next(features._replace(named=features.named + 0.1)) >= probability


@given(st.floats(-1e9, 1e9))
def test_log_odds_are_bounded(value: float) -> None:
    assert -CLIP <= clip(value) <= CLIP
    assert abs(log_odds(min(1.0, max(0.0, value)))) < 10
