"""Spec 3's aggregator over scripted sources: server selection, responses and errors."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from anabranch.app.aggregator import Aggregator
from anabranch.app.runs import StartedRun
from anabranch.domain.contracts import SystemClock
from anabranch.domain.mcp import (
    AggregatedResponse,
    Aggregation,
    AggregatorError,
    AggregatorQuery,
    AllServersFailed,
    ConfigError,
    InvalidQuery,
    McpServer,
    ServerRule,
    TimedOut,
)
from anabranch.domain.model import Context, Passage, Question, SourceReply, Status
from anabranch.domain.ranking import Weights
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.run import Run
from anabranch.testing import FakeDirectory, FakeSource, Recorder

NOW = 1_800_000_000.0
CLOCK = SystemClock()


class Configured(msgspec.Struct):
    configured: Mapping[str, McpServer]
    aggregation: Aggregation


class Bench:
    """An aggregator over the servers that are given, by name, as what they reply."""

    def __init__(self, servers: Mapping[str, FakeSource], aggregation: Aggregation | None = None, **given: Any) -> None:
        self.servers = servers
        self.asked: list[Question] = []
        configured = {name: McpServer(name=name, command="true", **given.get(name, {})) for name in servers}
        self._pipeline = Pipeline(
            directory=FakeDirectory(servers),
            clock=CLOCK,
            telemetry=Recorder(),
            limits=Limits(retrieval_timeout_s=30, generation_timeout_s=1, context_tokens=1),
        )
        self.aggregator = Aggregator(
            Configured(configured, aggregation or Aggregation()), self._begin, CLOCK, now=lambda: NOW
        )

    async def _begin(self, question: Question, context: Context) -> StartedRun:
        self.asked.append(question)
        return StartedRun(Run(self._pipeline, question, context, Recorder()).start(), None)

    async def ask(self, text: str = "refund policy", **query: Any) -> AggregatedResponse:
        context = Context(correlation_id="c-1", deadline=CLOCK.monotonic() + 60)
        return await self.aggregator.aggregate(AggregatorQuery(query_text=text, **query), context)

    async def refused(self, text: str = "refund policy", **query: Any) -> AggregatorError:
        with pytest.raises(AggregatorError) as caught:
            await self.ask(text, **query)
        assert not self.asked or caught.value.name in ("AllServersFailed", "Timeout")
        return caught.value

    def names(self) -> list[str]:
        return [endpoint.slug for endpoint in self.asked[-1].sources]


def found(server: str, *texts: str, **more: Any) -> FakeSource:
    passages = tuple(
        Passage(source=server, title=f"{server} {n}", text=text, score=0.0) for n, text in enumerate(texts)
    )
    return FakeSource(SourceReply(path=server, status=Status.SUCCESS, passages=passages), **more)


def failed(server: str, status: Status = Status.ERROR, error: str = "broken") -> FakeSource:
    return FakeSource(SourceReply(path=server, status=status, error=error))


def three(aggregation: Aggregation | None = None, **given: Any) -> Bench:
    return Bench(
        {name: found(name, f"{name} has it") for name in ("context7", "serena", "memory")}, aggregation, **given
    )


RULES = (
    ServerRule(pattern="documentation|library|package|module", servers=("context7",)),
    ServerRule(pattern="code|class|function|method|variable", servers=("serena",)),
    ServerRule(pattern=".*", servers=("context7", "serena", "memory")),
)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("the requests library", ["context7"]),
        ("library code", ["context7"]),
        ("which function is it?", ["serena"]),
        ("Documentation please", ["context7"]),
        ("lunch", ["context7", "serena", "memory"]),
    ],
)
async def test_aggregate_uses_the_first_matching_routing_rule(text: str, asked: list[str]) -> None:
    bench = three(Aggregation(server_rules=RULES))
    await bench.ask(text)
    assert bench.names() == asked


async def test_aggregate_without_a_matching_rule_asks_all_enabled_servers() -> None:
    bench = three(Aggregation(server_rules=RULES[:1]), serena={"enabled": False})
    await bench.ask("lunch")
    assert bench.names() == ["context7", "memory"]


async def test_routing_rules_skip_disabled_servers() -> None:
    bench = three(Aggregation(server_rules=RULES), serena={"enabled": False})
    await bench.ask("lunch")
    assert bench.names() == ["context7", "memory"]
    refused = await three(Aggregation(server_rules=RULES), serena={"enabled": False}).refused("which function is it?")
    assert isinstance(refused, ConfigError)
    assert refused.fields["field"] == "aggregator.serverRules[1].servers"


async def test_named_servers_override_routing_rules_and_an_empty_list_is_all() -> None:
    bench = three(Aggregation(server_rules=RULES))
    await bench.ask("which function is it?", servers=("memory", "memory", "context7"))
    assert bench.names() == ["memory", "context7"]
    await bench.ask("which function is it?", servers=())
    assert bench.names() == ["context7", "serena", "memory"]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"text": ""}, "query_text is empty"),
        ({"text": " \n"}, "query_text is empty"),
        ({"text": "x" * 10_001}, "query_text has 10,001 characters; it may have 10,000"),
        ({"text": "\ud800"}, "query_text is not valid UTF-8"),
        ({"max_results": 9}, "max_results is 9; it must be from 10 to 100"),
        ({"max_results": 101}, "max_results is 101; it must be from 10 to 100"),
        ({"servers": ("memory", "nobody")}, "servers names 'nobody'; there are: context7, memory"),
        ({"servers": ("serena",)}, "the server 'serena' is switched off; there are: context7, memory"),
    ],
    ids=["empty", "blank", "long", "surrogate", "few", "many", "unknown", "off"],
)
async def test_an_invalid_aggregator_query_fails_before_any_server_is_asked(query: dict[str, Any], reason: str) -> None:
    refused = await three(serena={"enabled": False}).refused(**query)
    assert isinstance(refused, InvalidQuery)
    assert refused.fields["reason"] == reason
    shown = refused.fields["query"]
    assert isinstance(shown, str)
    assert len(shown) <= 200


async def test_a_disabled_aggregator_or_no_servers_is_a_config_error() -> None:
    for bench, field in (
        (three(Aggregation(enabled=False)), "aggregator.enabled"),
        (Bench({}), "mcpServers"),
        (Bench({"one": found("one")}, one={"enabled": False}), "mcpServers"),
    ):
        refused = await bench.refused()
        assert isinstance(refused, ConfigError)
        assert refused.fields["field"] == field


async def test_aggregation_metadata_reports_every_server() -> None:
    refund = "Refunds are paid within thirty days of the purchase."
    bench = Bench(
        {
            "a": found("a", refund, "Nothing to do with it."),
            "b": found("b", refund, refund.replace("thirty", "forty"), "A policy on refunds is on the last page."),
            "c": failed("c"),
            "d": found("d"),
        },
        a={"reputation": 1.0},
    )
    response = await bench.ask(request_id="mine", max_results=10)
    told = response.metadata
    assert (told.request_id, told.servers_queried, told.servers_succeeded) == ("mine", 4, 3)
    assert told.timestamp == "2027-01-15T08:00:00.000Z"
    assert (await bench.ask()).metadata.request_id == "c-1", "without one, the correlation id"
    assert (told.total_results_raw, told.total_results_dedup, told.results_returned) == (5, 3, 3)
    assert told.server_diversity == round(2 / 3, 4)
    assert [(one.server_name, one.status, one.results, one.error) for one in told.servers] == [
        ("a", "success", 2, None),
        ("b", "success", 3, None),
        ("c", "error", 0, "broken"),
        ("d", "success", 0, None),
    ]
    assert [result.rank for result in response.results] == [1, 2, 3]
    kept = next(result for result in response.results if result.server_result.content.text == refund)
    assert kept.server_result.server_name == "a"
    assert kept.server_result.timestamp == "2027-01-15T08:00:00.000Z"
    json = msgspec.to_builtins(response)
    assert set(json["results"][0]) == {
        "rank",
        "relevance_score",
        "score_breakdown",
        "weighted_parts",
        "server_result",
    }


async def test_weighted_parts_sum_to_relevance_scores_in_rank_order() -> None:
    texts = [f"{'refund ' * n}policy {n} " + "word " * 40 * n for n in range(1, 40)]
    weights = Weights(keyword_match=3, freshness=1, server_reputation=0.5, length_penalty=7)
    response = await Bench({"a": found("a", *texts)}, Aggregation(ranking_weights=weights)).ask(max_results=100)
    shares = msgspec.structs.asdict(response.metadata.ranking_weights)
    assert math.isclose(sum(shares.values()), 1, abs_tol=2e-6)
    scores = [result.relevance_score for result in response.results]
    assert scores == sorted(scores, reverse=True)
    for result in response.results:
        weighted = msgspec.structs.asdict(result.weighted_parts)
        assert math.isclose(sum(weighted.values()), result.relevance_score, abs_tol=1e-9)
        for name, part in msgspec.structs.asdict(result.score_breakdown).items():
            assert 0 <= part <= 1
            assert math.isclose(part * shares[name], weighted[name], abs_tol=2e-6)
        assert 0 <= result.relevance_score <= 1


async def test_max_results_limits_aggregation_and_defaults_to_thirty() -> None:
    texts = [f"{n} " * 30 for n in range(60)]
    assert len((await Bench({"a": found("a", *texts)}).ask()).results) == 30
    response = await Bench({"a": found("a", *texts)}).ask(max_results=10)
    assert (len(response.results), response.metadata.total_results_dedup) == (10, 60)


async def test_no_results_is_a_response_and_all_servers_failed_is_an_error() -> None:
    response = await Bench({"a": found("a"), "b": failed("b")}).ask()
    assert (response.results, response.metadata.server_diversity) == ((), 0.0)
    refused = await Bench({"a": failed("a"), "b": failed("b", Status.TIMEOUT, "late")}).refused()
    assert isinstance(refused, AllServersFailed)
    assert refused.fields == {"attempted": ["a", "b"], "errors": ["broken", "late"]}
    refused = await Bench({"a": failed("a", Status.TIMEOUT), "b": failed("b", Status.TIMEOUT)}).refused()
    assert isinstance(refused, TimedOut)
    assert refused.fields["limit_ms"] == 3000
    assert refused.fields["elapsed_ms"] in range(3000)


async def test_servers_are_asked_at_once_and_their_times_are_reported() -> None:
    bench = Bench(
        {name: found(name, f"{name} " * 9, delay_s=0.3) for name in ("weir", "delta", "gauge", "bank", "lock")}
    )
    response = await bench.ask()
    times = [result.server_result.response_time_ms for result in response.results]
    assert len(times) == 5
    assert all(300 <= time <= 1_000 for time in times)
    assert 300 <= response.metadata.processing_time_ms < 5 * 300, "one after the other it would take 1.5 s"


async def test_a_call_that_times_out_says_after_how_long() -> None:
    refused = await Bench({"slow": found("slow", delay_s=30)}, Aggregation(total_timeout_s=0.2)).refused()
    assert isinstance(refused, TimedOut)
    assert refused.fields["limit_ms"] == 200
    assert refused.fields["elapsed_ms"] in range(200, 5_000)


async def test_ten_servers_with_a_hundred_results_each_are_ranked_within_the_total_timeout() -> None:
    words = ("river", "delta", "gauge", "levee", "basin", "weir", "bank", "flood", "ford", "lock")

    def texts(server: int) -> list[str]:
        return [" ".join(words[(server + n * at) % 10] * (at % 3) + str(n) for at in range(20)) for n in range(100)]

    servers = {f"s{n}": found(f"s{n}", *texts(n)) for n in range(10)}
    patient = Aggregation(total_timeout_s=30.0)  # a busy machine
    told = (await Bench(servers, patient).ask("river delta", max_results=100)).metadata
    assert (told.servers_succeeded, told.total_results_raw, told.results_returned) == (10, 1_000, 100)
    assert told.processing_time_ms < 30_000


async def test_total_timeout_returns_the_results_that_arrived() -> None:
    bench = Bench(
        {"quick": found("quick", "here"), "slow": found("slow", delay_s=30)}, Aggregation(total_timeout_s=0.1)
    )
    async with asyncio.timeout(5):
        response = await bench.ask()
    assert [result.server_result.content.text for result in response.results] == ["here"]
    assert [one.status for one in response.metadata.servers] == ["success", "timeout"]
    alone = Bench({"slow": found("slow", delay_s=30)}, Aggregation(total_timeout_s=0.1))
    assert isinstance(await alone.refused(), TimedOut)


async def test_aggregate_reports_progress_per_server() -> None:
    bench = Bench({"slow": found("slow", "later", delay_s=0.05), "quick": found("quick", "now")})
    heard: list[tuple[str, int, int]] = []

    async def hear(reply: SourceReply, done: int, total: int) -> None:
        heard.append((reply.path, done, total))

    context = Context(correlation_id="c", deadline=CLOCK.monotonic() + 60)
    await bench.aggregator.aggregate(AggregatorQuery(query_text="when?"), context, hear)
    assert heard == [("quick", 1, 2), ("slow", 2, 2)]
