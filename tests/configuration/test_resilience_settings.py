"""The settings towards upstreams: what each does, as seen by those who ask and by the upstream."""

from collections.abc import AsyncGenerator

import pytest

from anabranch.domain.errors import FailureKind, GenerationFailed
from anabranch.domain.model import Context, Delta, Endpoint, Prompt, Query, SourceReply, Status
from anabranch.policies.breaker import Policy
from anabranch.policies.resilience import Resilience
from anabranch.testing import FakeSource, ManualClock, Recorder
from support.environment import loaded

QUERY = Query(text="Why?", limit=3, similarity_threshold=0.0)
PROMPT = Prompt(question="Why?", messages=(), max_tokens=1, temperature=0.0, passages=(), version="test")
ENDPOINT = Endpoint(slug="docs", url="http://upstream.example")
GOOD = SourceReply(path="docs", status=Status.SUCCESS)
BROKEN = SourceReply(path="docs", status=Status.ERROR, error="It broke.", fault=True)


class Down:
    """A model that always fails, and asks for no wait; it counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        self.asked += 1
        raise GenerationFailed("It broke.", FailureKind.DOWN, 0.0)
        yield Delta(text="never")  # type: ignore[unreachable]


class Upstream:
    """A Resilience that has read these variables, and an upstream behind it."""

    def __init__(self, **variables: str) -> None:
        self.clock = ManualClock(1_000.0)
        self._resilience = Resilience(Policy.of(loaded(**variables)), self.clock, Recorder())

    def _context(self) -> Context:
        return Context(correlation_id="c", deadline=self.clock.monotonic() + 100)

    async def searched(self, *replies: SourceReply) -> list[Status]:
        """What those see who ask a source that replies so."""
        return [
            (await self._resilience.source(ENDPOINT, lambda _: FakeSource(reply)).search(QUERY, self._context())).status  # noqa: B023
            for reply in replies
        ]

    async def asked(self, questions: int) -> int:
        """How often a model that is down is asked for so many questions."""
        model = Down()
        for _ in range(questions):
            with pytest.raises(GenerationFailed):
                async for _ in self._resilience.generator(ENDPOINT, model).generate(PROMPT, self._context()):
                    pass
        return model.asked


@pytest.mark.parametrize(("retries", "asked"), [("0", 1), ("1", 2), ("2", 3)])
async def test_model_retries_is_how_often_a_model_is_asked_again(retries: str, asked: int) -> None:
    assert await Upstream(MODEL_RETRIES=retries).asked(1) == asked


@pytest.mark.parametrize(("budget", "again"), [("0", 2), ("0.2", 20), ("0.5", 50)])
async def test_retry_budget_is_the_share_that_is_asked_again(budget: str, again: int) -> None:
    asked = await Upstream(RETRY_BUDGET=budget, BREAKER_CALLS="1000").asked(100)
    assert asked == 100 + again


@pytest.mark.parametrize(("window", "seen"), [("100", Status.SKIPPED), ("5", Status.ERROR)])
async def test_breaker_window_is_how_long_failures_count(window: str, seen: Status) -> None:
    upstream = Upstream(BREAKER_WINDOW=window)
    for _ in range(10):
        await upstream.searched(BROKEN)
        upstream.clock.advance(1)
    assert await upstream.searched(BROKEN) == [seen]


@pytest.mark.parametrize("calls", [1, 3, 10])
async def test_breaker_calls_are_the_fewest_that_say_anything(calls: int) -> None:
    upstream = Upstream(BREAKER_CALLS=str(calls))
    assert await upstream.searched(*[BROKEN] * (calls + 1)) == [Status.ERROR] * calls + [Status.SKIPPED]


@pytest.mark.parametrize(("rate", "seen"), [("0.2", Status.SKIPPED), ("0.21", Status.SUCCESS), ("1", Status.SUCCESS)])
async def test_breaker_rate_is_the_share_of_failures(rate: str, seen: Status) -> None:
    upstream = Upstream(BREAKER_RATE=rate)
    await upstream.searched(*[GOOD] * 8, BROKEN, BROKEN)
    assert await upstream.searched(GOOD) == [seen]


@pytest.mark.parametrize("pause_s", [1, 60])
async def test_breaker_pause_is_how_long_an_upstream_is_left_alone(pause_s: int) -> None:
    upstream = Upstream(BREAKER_PAUSE=str(pause_s))
    await upstream.searched(*[BROKEN] * 10)
    upstream.clock.advance(pause_s - 0.5)
    assert await upstream.searched(GOOD) == [Status.SKIPPED]
    upstream.clock.advance(0.5)
    assert await upstream.searched(GOOD) == [Status.SUCCESS]
