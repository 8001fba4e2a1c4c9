"""Spec 3's aggregator: selects the MCP servers for a query and builds the response from their ranked results."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from anabranch.app import questions
from anabranch.app.mcp_servers import endpoint_of, selected
from anabranch.app.runs import StartedRun
from anabranch.domain.contracts import Clock
from anabranch.domain.errors import DeadlineExceeded
from anabranch.domain.events import SourceReplied
from anabranch.domain.mcp import (
    FEWEST,
    MOST,
    AggregatedResponse,
    Aggregation,
    AggregationMetadata,
    AggregatorQuery,
    AllServersFailed,
    ConfigError,
    InvalidQuery,
    McpServer,
    RankedResult,
    ResultContent,
    ServerReport,
    ServerResult,
    TimedOut,
)
from anabranch.domain.model import MAX_QUERY, Answer, Context, Passage, Question, SourceReply, Status
from anabranch.domain.ranking import Breakdown, Ranking, Weights
from anabranch.domain.rights import EVERY_GRANT, Grants
from anabranch.sources.mcp.pool import load_sdk

# Called for each server's reply, with how many have replied, and of how many.
OnReply = Callable[[SourceReply, int, int], Awaitable[None]]

DAY_S = 86_400.0
# Servers have the total time-out; ranking comes after it.
RANKING_S = 5.0
MAX_SHOWN = 200
MAX_REQUEST_ID = 200
NO_BREAKDOWN = Breakdown(keyword_match=0.0, freshness=0.0, server_reputation=0.0, length_penalty=0.0)
NO_REPLY = "None of the servers answered within {:.3g} s."
RANKING_TOO_SLOW = "The results could not be ranked within {:.3g} s: the aggregator is overloaded."


class Configured(Protocol):
    """The current configuration, which a reload replaces."""

    configured: Mapping[str, McpServer]
    aggregation: Aggregation


class Aggregator:
    """`begin` starts a Run that counts against its caller's rate limit."""

    def __init__(
        self,
        servers: Configured,
        begin: Callable[[Question, Context], Awaitable[StartedRun]],
        clock: Clock,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._servers = servers
        self._begin = begin
        self._clock = clock
        self._now = now

    async def aggregate(
        self,
        query: AggregatorQuery,
        context: Context,
        on_reply: OnReply | None = None,
        grants: Grants = EVERY_GRANT,
    ) -> AggregatedResponse:
        """Raises one of spec 3's errors: before any server is asked if the query or the configuration is invalid, after
        it if no server answered."""
        config = self._servers.aggregation
        if not config.enabled:
            raise _misconfigured("aggregator.enabled", "the aggregator is switched off")
        _check(query)
        names = self._selected(query, grants)
        await load_sdk()  # the servers' time does not include ours
        began, asked_at = self._clock.monotonic(), self._now()
        question = self._question(query, names, config, asked_at)
        deadline = min(began + config.total_timeout_s + RANKING_S, context.deadline)
        answer, replied_at = await self._answer(question, msgspec.structs.replace(context, deadline=deadline), on_reply)
        elapsed_ms = round((self._clock.monotonic() - began) * 1000)
        _check_replies(answer.replies, elapsed_ms, config)
        return _response(answer, query, config, replied_at, context.correlation_id, asked_at, elapsed_ms)

    def _selected(self, query: AggregatorQuery, grants: Grants) -> Sequence[str]:
        """The servers that the query names, else those of the first matching rule, else all. Disabled servers are left
        out; naming one is an error, as naming one that is not granted."""
        configured = {name: one for name, one in self._servers.configured.items() if grants.server(name)}
        on = [name for name, server in configured.items() if server.enabled]
        if not on:
            raise _misconfigured("mcpServers", "no server is configured" if not configured else "all are switched off")
        if query.servers:
            for name in query.servers:
                if name not in configured:
                    raise _invalid(query, f"servers names {name[:MAX_SHOWN]!r}; there are: {', '.join(on)}")
                if name not in on:
                    raise _invalid(query, f"the server {name!r} is switched off; there are: {', '.join(on)}")
            return list(dict.fromkeys(query.servers))
        if query.servers is not None:
            return on
        rules = self._servers.aggregation.server_rules
        rule, names = selected(query.query_text, configured, rules)
        if not names and len(configured) < len(self._servers.configured):
            return on  # the rule is for servers that the caller may not use
        if rule is not None and not names:
            field = f"aggregator.serverRules[{rules.index(rule)}].servers"
            raise _misconfigured(field, "the rule matches, but all of its servers are switched off")
        return names

    def _question(self, query: AggregatorQuery, names: Sequence[str], config: Aggregation, now: float) -> Question:
        configured = self._servers.configured
        ranking = Ranking(
            weights=config.ranking_weights,
            limit=config.default_max_results if query.max_results is None else query.max_results,
            threshold=config.dedup_threshold,
            half_life_s=config.freshness_half_life_days * DAY_S,
            now=now,
            reputations={name: configured[name].reputation for name in names},
        )
        return questions.aggregate(query.query_text, tuple(map(endpoint_of, names)), ranking, config.total_timeout_s)

    async def _answer(
        self, question: Question, context: Context, on_reply: OnReply | None
    ) -> tuple[Answer, Mapping[str, float]]:
        """The answer, and when each server replied."""
        began = self._clock.monotonic()
        replied_at: dict[str, float] = {}
        run, _ = await self._begin(question, context)
        try:
            async with run.listen() as listener:
                async for event in listener:
                    if isinstance(event, SourceReplied):
                        replied_at[event.reply.path] = self._now()
                        if on_reply is not None:
                            await on_reply(event.reply, len(replied_at), len(question.sources))
                return await run.value(), replied_at
        except DeadlineExceeded:
            message = RANKING_TOO_SLOW if replied_at else NO_REPLY
            raise _timed_out(message, self._clock.monotonic() - began, context.deadline - began) from None


def _check(query: AggregatorQuery) -> None:
    text, count = query.query_text, query.max_results
    checks = (
        (not text.strip(), "query_text is empty"),
        (len(text) > MAX_QUERY, f"query_text has {len(text):,} characters; it may have {MAX_QUERY:,}"),
        (_encodable(text) != text, "query_text is not valid UTF-8"),
        (
            count is not None and not FEWEST <= count <= MOST,
            f"max_results is {count}; it must be from {FEWEST} to {MOST}",
        ),
        (len(query.request_id or "") > MAX_REQUEST_ID, f"request_id may have {MAX_REQUEST_ID} characters"),
    )
    for is_wrong, reason in checks:
        if is_wrong:
            raise _invalid(query, reason)


def _check_replies(replies: Sequence[SourceReply], elapsed_ms: int, config: Aggregation) -> None:
    """Fails if every server failed; a server without results has succeeded."""
    if any(reply.status is Status.SUCCESS for reply in replies):
        return
    if all(reply.status is Status.TIMEOUT for reply in replies):
        raise _timed_out(NO_REPLY, elapsed_ms / 1000, min(config.server_timeout_s, config.total_timeout_s))
    errors = [reply.error or reply.status.value for reply in replies]
    tried = ", ".join(f"{reply.path} ({error})" for reply, error in zip(replies, errors, strict=True))
    raise AllServersFailed(
        f"None of the servers gave an answer: {tried}", attempted=[reply.path for reply in replies], errors=errors
    )


def _response(
    answer: Answer,
    query: AggregatorQuery,
    config: Aggregation,
    replied_at: Mapping[str, float],
    correlation_id: str,
    asked_at: float,
    elapsed_ms: int,
) -> AggregatedResponse:
    shares = config.ranking_weights.shares
    replies = {reply.path: reply for reply in answer.replies}
    succeeded = sum(reply.status is Status.SUCCESS for reply in answer.replies)
    return AggregatedResponse(
        results=tuple(
            _result(rank, passage, shares, replies[passage.source], replied_at.get(passage.source, asked_at))
            for rank, passage in enumerate(answer.passages, 1)
        ),
        metadata=AggregationMetadata(
            request_id=query.request_id or correlation_id,
            timestamp=_iso(asked_at),
            servers_queried=len(answer.replies),
            servers_succeeded=succeeded,
            total_results_raw=sum(len(reply.passages) for reply in answer.replies),
            total_results_dedup=answer.distinct or 0,
            dedup_complete=answer.compared,
            results_returned=len(answer.passages),
            processing_time_ms=elapsed_ms,
            server_diversity=round(len({one.source for one in answer.passages}) / succeeded, 4) if succeeded else 0.0,
            ranking_weights=shares.rounded,
            servers=tuple(
                ServerReport(
                    server_name=reply.path,
                    status=reply.status,
                    response_time_ms=reply.latency_ms,
                    results=len(reply.passages),
                    error=reply.error,
                )
                for reply in answer.replies
            ),
        ),
    )


def _result(rank: int, passage: Passage, shares: Weights, reply: SourceReply, replied_at: float) -> RankedResult:
    breakdown = passage.breakdown or NO_BREAKDOWN
    return RankedResult(
        rank=rank,
        relevance_score=passage.score,
        score_breakdown=breakdown,
        weighted_parts=breakdown.weighted(shares),
        server_result=ServerResult(
            server_name=passage.source,
            content=ResultContent(
                title=passage.title,
                text=passage.text,
                url=passage.url,
                date=None if passage.date is None else _iso(passage.date),
            ),
            response_time_ms=reply.latency_ms,
            timestamp=_iso(replied_at),
        ),
    )


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _invalid(query: AggregatorQuery, reason: str) -> InvalidQuery:
    text = _encodable(query.query_text[:MAX_SHOWN])
    return InvalidQuery(f"The query is invalid: {reason}.", query=text, reason=reason)


def _misconfigured(field: str, reason: str) -> ConfigError:
    return ConfigError(f"{field}: {reason}.", field=field, reason=reason)


def _timed_out(message: str, elapsed_s: float, limit_s: float) -> TimedOut:
    return TimedOut(message.format(limit_s), elapsed_ms=round(elapsed_s * 1000), limit_ms=round(limit_s * 1000))
