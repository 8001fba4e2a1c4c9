"""Circuit breakers open at a rate of failures and make one trial call; the number of upstreams is bounded."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.model import Context, Endpoint, Query, SourceReply, Status
from anabranch.domain.shares import claimant
from anabranch.domain.signals import BreakerState, BreakerStateChanged
from anabranch.network.outbound import CallPlaces
from anabranch.policies.breaker import BUCKETS, UNTRUSTED, Breaker, Policy, Upstreams
from anabranch.testing import FakeSource, ManualClock, Recorder
from support.examples import examples
from support.scripted_source import BROKEN, ENDPOINT, GOOD, QUERY, REFUSED, Bench, Held, turns, until

WINDOW_S, MIN_CALLS, RATE, PAUSE_S = 30.0, 4, 0.5, 10.0


def breaker(clock: ManualClock, telemetry: Recorder | None = None) -> Breaker:
    return Breaker(
        "alice/docs",
        Policy(window_s=WINDOW_S, min_calls=MIN_CALLS, rate=RATE, pause_s=PAUSE_S),
        clock,
        telemetry or Recorder(),
    )


def opened(clock: ManualClock, telemetry: Recorder | None = None) -> Breaker:
    made = breaker(clock, telemetry)
    for _ in range(MIN_CALLS):
        made.leave(made.enter(), good=False)
    assert made.state == "open"
    return made


class Naive:
    """The same, written down as it is described: every outcome is kept, and counted anew each time."""

    def __init__(self) -> None:
        self.state: BreakerState = "closed"
        self.outcomes: list[tuple[int, bool]] = []
        self.opened_at = 0.0
        self.period = 0
        self.probe = False

    def enter(self, now: float) -> tuple[int, bool]:
        if self.state == "open" and now - self.opened_at >= PAUSE_S:
            self.move("half_open")
        if self.state == "half_open" and not self.probe:
            self.probe = True
            return self.period, True
        return self.period, self.state == "closed"

    def leave(self, period: int, good: bool | None, now: float) -> None:
        if period != self.period:
            return
        if self.state == "half_open":
            self.probe = False
            if good is not None:
                self.outcomes = []
                self.opened_at = now
                self.move("closed" if good else "open")
        elif good is not None:
            bucket = int(now * (BUCKETS / WINDOW_S))
            self.outcomes.append((bucket, good))
            recent = [ok for when, ok in self.outcomes if when > bucket - BUCKETS]
            if not good and len(recent) >= MIN_CALLS and recent.count(False) / len(recent) >= RATE:
                self.opened_at = now
                self.move("open")

    def move(self, state: BreakerState) -> None:
        self.state = state
        self.period += 1
        self.probe = False


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.3, 1.0, 2.9, 3.0, 5.0, 10.0, 31.0, 400.0])),
        st.tuples(st.just("enter"), st.none()),
        st.tuples(st.just("leave"), st.tuples(st.integers(0, 5), st.sampled_from([True, False, False, None]))),
    ),
    max_size=80,
)


@given(STEPS)
@settings(max_examples=examples(300), deadline=None)
def test_the_breaker_behaves_like_a_naive_model(steps: list[tuple[str, object]]) -> None:
    clock, naive = ManualClock(1_000.0), Naive()
    tested = breaker(clock)
    under_way: list[tuple[int, int]] = []
    for step, given_ in steps:
        now = clock.monotonic()
        if step == "wait" and isinstance(given_, float):
            clock.advance(given_)
        elif step == "enter":
            turn = tested.enter()
            period, admitted = naive.enter(now)
            assert bool(turn) == admitted
            if admitted:
                under_way.append((turn, period))
        elif isinstance(given_, tuple) and under_way:
            place, good = given_
            turn, period = under_way.pop(place % len(under_way))
            tested.leave(turn, good)
            naive.leave(period, good, now)
        assert tested.state == naive.state


def test_the_breaker_reports_each_change_of_state() -> None:
    clock, telemetry = ManualClock(), Recorder()
    made = opened(clock, telemetry)
    clock.advance(PAUSE_S)
    made.leave(made.enter(), good=False)
    clock.advance(PAUSE_S)
    made.leave(made.enter(), good=True)
    states = [signal.state for signal in telemetry.signals if isinstance(signal, BreakerStateChanged)]
    assert states == ["open", "half_open", "open", "half_open", "closed"]


def test_too_few_calls_do_not_open_the_breaker_and_old_ones_expire() -> None:
    clock = ManualClock()
    made = breaker(clock)
    for _ in range(MIN_CALLS - 1):
        made.leave(made.enter(), good=False)
    clock.advance(WINDOW_S)
    made.leave(made.enter(), good=False)
    assert made.state == "closed"


def test_a_breaker_that_closes_clears_its_counts() -> None:
    clock = ManualClock()
    made = opened(clock)
    clock.advance(PAUSE_S)
    made.leave(made.enter(), good=True)
    for _ in range(MIN_CALLS - 1):
        made.leave(made.enter(), good=False)
    assert made.state == "closed"


def test_a_call_from_before_the_pause_is_not_the_trial_call() -> None:
    clock = ManualClock()
    made = breaker(clock)
    early = made.enter()
    for _ in range(MIN_CALLS):
        made.leave(made.enter(), good=False)
    clock.advance(PAUSE_S)
    assert made.enter()
    made.leave(early, good=True)
    assert made.state == "half_open"
    assert not made.enter()


def test_the_first_token_of_a_trial_call_closes_the_breaker() -> None:
    clock = ManualClock()
    made = opened(clock)
    clock.advance(PAUSE_S)
    turn = made.answered(made.enter())
    assert made.state == "closed"
    made.leave(turn, good=False)
    assert made.state == "closed"


@pytest.mark.parametrize(("left_s", "says"), [(7.2, "for 8 more seconds"), (0.4, "for 1 more second")])
def test_the_refusal_of_an_open_breaker_says_for_how_long(left_s: float, says: str) -> None:
    clock = ManualClock()
    made = opened(clock)
    clock.advance(PAUSE_S - left_s)
    assert made.refusal.endswith(says)
    assert made.blocked


# --- through a source


async def tripped(bench: Bench) -> None:
    failing = bench.resilience.source(ENDPOINT, lambda _: FakeSource(BROKEN))
    for _ in range(10):
        assert await failing.search(QUERY, bench.context()) == BROKEN


async def test_a_source_with_an_open_circuit_is_skipped_with_a_message() -> None:
    bench = Bench()
    await tripped(bench)
    inner = FakeSource(GOOD)
    reply = await bench.resilience.source(ENDPOINT, lambda _: inner).search(QUERY, bench.context())
    assert reply.status is Status.SKIPPED
    assert reply.error == "The source has failed too often: its circuit is open for 10 more seconds."
    assert (reply.path, inner.queries, reply.fault) == ("alice/docs", [], False)
    assert bench.resilience.upstreams.states() == {"alice/docs": "open"}
    bench.clock.advance(10)
    assert await bench.resilience.source(ENDPOINT, lambda _: inner).search(QUERY, bench.context()) == GOOD
    assert bench.resilience.upstreams.states() == {"alice/docs": "closed"}


@pytest.mark.parametrize("reply", [REFUSED, SourceReply(path="alice/docs", status=Status.ERROR, error="404")])
async def test_refused_requests_do_not_open_the_breaker(reply: SourceReply) -> None:
    bench = Bench()
    source = bench.resilience.source(ENDPOINT, lambda _: FakeSource(reply))
    for _ in range(50):
        assert await source.search(QUERY, bench.context()) == reply
    assert bench.resilience.upstreams.states() == {"alice/docs": "closed"}


async def test_a_half_open_breaker_lets_one_trial_call_through() -> None:
    bench = Bench()
    await tripped(bench)
    bench.clock.advance(10)
    held = Held()
    source = bench.resilience.source(ENDPOINT, lambda _: held)
    calls = [asyncio.create_task(source.search(QUERY, bench.context())) for _ in range(20)]
    await until(lambda: sum(call.done() for call in calls) == 19)
    assert held.asked == 1
    held.reply(GOOD)
    replies = await asyncio.gather(*calls)
    assert [reply.status for reply in replies].count(Status.SKIPPED) == 19
    assert bench.resilience.upstreams.states() == {"alice/docs": "closed"}


@pytest.mark.parametrize(("passes_s", "state"), [(1.0, "half_open"), (30.0, "open")])
async def test_a_cancelled_trial_call_allows_another_and_a_timeout_opens_the_breaker(
    passes_s: float, state: str
) -> None:
    bench = Bench()
    await tripped(bench)
    bench.clock.advance(10)
    held = Held()
    source = bench.resilience.source(ENDPOINT, lambda _: held)
    call = asyncio.create_task(source.search(QUERY, bench.context(left_s=30)))
    await until(lambda: held.asked == 1)
    bench.clock.advance(passes_s)
    call.cancel()
    await asyncio.wait([call])
    assert bench.resilience.upstreams.states() == {"alice/docs": state}
    bench.clock.advance(10)
    again = asyncio.create_task(source.search(QUERY, bench.context()))
    await until(lambda: held.asked == 2)
    held.reply(GOOD)
    assert (await again).status is Status.SUCCESS


async def test_timeouts_count_as_failures_and_disconnected_clients_do_not() -> None:
    for passes_s, state in ((0.0, "closed"), (30.0, "open")):
        bench = Bench()
        held = Held()
        source = bench.resilience.source(ENDPOINT, lambda _, held=held: held)  # type: ignore[misc]
        calls = [asyncio.create_task(source.search(QUERY, bench.context(left_s=30))) for _ in range(10)]
        await until(lambda held=held: held.asked == 10)  # type: ignore[misc]
        bench.clock.advance(passes_s)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert bench.resilience.upstreams.states() == {"alice/docs": state}


async def test_a_call_that_waits_for_its_callers_own_until_the_deadline_says_nothing_about_the_source() -> None:
    """One caller could open the circuit of a source for all others, by asking more than it may at once."""
    bench = Bench()
    places = CallPlaces(1)

    class AfterItsTurn(Held):
        async def search(self, query: Query, context: Context) -> SourceReply:
            caller = claimant.get().name
            if not places.take(caller):
                await places.turn(caller)
            try:
                return await super().search(query, context)
            finally:
                places.leave(caller)

    held = AfterItsTurn()
    source = bench.resilience.source(ENDPOINT, lambda _: held)
    asking = asyncio.create_task(source.search(QUERY, bench.context()))
    await until(lambda: held.asked == 1)
    waiting = [asyncio.create_task(source.search(QUERY, bench.context(left_s=30))) for _ in range(20)]
    await turns()
    bench.clock.advance(30)
    for call in waiting:
        call.cancel()
    await asyncio.wait(waiting)
    assert bench.resilience.upstreams.states() == {"alice/docs": "closed"}
    held.reply(GOOD)
    assert await asking == GOOD
    assert held.asked == 1


async def test_each_upstream_call_has_a_span_and_its_context() -> None:
    bench = Bench()
    source = bench.resilience.source(ENDPOINT, lambda _: FakeSource(GOOD))
    await source.search(QUERY, bench.context())
    (span,) = bench.telemetry.spans
    assert span.name == "upstream"
    assert span.attributes == {"server.address": "first.example", "anabranch.upstream": "alice/docs"}
    assert span.ended


# --- many upstreams


def test_the_number_of_upstreams_is_bounded_and_the_least_recently_used_go_first() -> None:
    clock = ManualClock()
    known = Upstreams(Policy(), clock, Recorder(), max_upstreams=100)
    named = msgspec.structs.replace(ENDPOINT, operator=False)
    kept, vouched = known.of(named), known.of(ENDPOINT)
    for number in range(1_000):
        known.of(Endpoint(slug=f"s{number}", url="http://any.example"))
        assert known.of(named) is kept
    assert len(known.since(-1.0)) == 101
    assert known.of(ENDPOINT) is vouched, "those whom strangers name do not push out the operator's"
    assert set(known.states()) == {
        "alice/docs",
        f"alice/docs{UNTRUSTED}",
        *(f"s{number}{UNTRUSTED}" for number in range(901, 1_000)),
    }


def test_upstreams_with_very_long_urls_are_not_kept() -> None:
    known = Upstreams(Policy(), ManualClock(), Recorder())
    for endpoint in (
        Endpoint(slug="s", url="http://any.example/" + "x" * 10_000),
        Endpoint(slug="x" * 10_000, url="http://any.example"),
        Endpoint(slug="s", url="http://any.example", owner="x" * 10_000),
    ):
        assert known.of(endpoint).breaker.enter()
    assert len(known.since(-1.0)) == 0


def test_an_unused_upstream_is_listed_only_while_its_circuit_is_open() -> None:
    clock = ManualClock()
    known = Upstreams(Policy(), clock, Recorder())
    known.of(Endpoint(slug="fine", url="http://any.example"))
    bad = known.of(Endpoint(slug="bad", url="http://any.example")).breaker
    for _ in range(10):
        bad.leave(bad.enter(), good=False)
    clock.advance(91)
    assert known.states() == {f"bad{UNTRUSTED}": "open"}


def test_of_two_upstreams_with_the_same_name_the_worse_state_is_listed() -> None:
    known = Upstreams(Policy(), ManualClock(), Recorder())
    bad = known.of(Endpoint(slug="docs", url="http://one.example")).breaker
    for _ in range(10):
        bad.leave(bad.enter(), good=False)
    known.of(Endpoint(slug="docs", url="http://two.example"))
    known.of(Endpoint(slug="odd", url="http://[::1"))
    assert known.states() == {f"docs{UNTRUSTED}": "open", f"odd{UNTRUSTED}": "closed"}


def test_unused_upstreams_are_dropped() -> None:
    clock, telemetry = ManualClock(), Recorder()
    known = Upstreams(Policy(min_calls=1), clock, telemetry)
    for name in ("bad", "fine"):
        breaker = known.of(Endpoint(slug=name, url="http://any.example")).breaker
        breaker.leave(breaker.enter(), name == "fine")
    clock.advance(99)
    known.drop_unused()
    assert len(known.since(-1.0)) == 2
    clock.advance(2)
    busy = known.of(Endpoint(slug="busy", url="http://any.example"))
    busy.busy, busy.used = 1, 0.0
    known.drop_unused()
    assert len(known.since(-1.0)) == 1, "one that is being asked is not forgotten"
    assert telemetry.signals == [
        BreakerStateChanged(upstream=f"bad{UNTRUSTED}", state="open"),
        BreakerStateChanged(upstream=f"bad{UNTRUSTED}", state="closed"),
    ]


def test_failures_of_a_callers_endpoint_do_not_open_the_operators_circuit() -> None:
    known = Upstreams(Policy(min_calls=1), ManualClock(), Recorder())
    mine = Endpoint(slug="gpt", url="http://models.example", kind="openai", operator=True)
    for named in (
        msgspec.structs.replace(mine, operator=False),
        msgspec.structs.replace(mine, operator=False, kind="space"),
    ):
        breaker = known.of(named, role="model").breaker
        breaker.leave(breaker.enter(), False)
        assert breaker.state == "open"
    assert known.of(mine, role="model").breaker.state == "closed"
    assert known.of(mine, role="embeddings") is not known.of(mine, role="model")
