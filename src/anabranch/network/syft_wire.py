"""The SyftAI-Space protocol: URLs, headers with tokens, and the meaning of error replies."""

import re
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any
from urllib.parse import quote

import msgspec

from anabranch.domain.contracts import Exchange, Outbound
from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.domain.model import Context, Endpoint, Status, Value
from anabranch.network.large_json import decoded
from anabranch.network.redaction import MAX_QUOTED, quoted

OUTCOMES = {
    "access_denied": Status.ACCESS_DENIED,
    "rate_limited": Status.RATE_LIMITED,
    "policy_violation": Status.POLICY_VIOLATION,
    "payment_required": Status.PAYMENT_FAILED,
    "payment_failed": Status.PAYMENT_FAILED,
}
REFUSALS = {
    401: (Status.ACCESS_DENIED, "It asks for a valid token (401)"),
    402: (Status.PAYMENT_FAILED, "It asks for payment (402)"),
    403: (Status.ACCESS_DENIED, "It denied access (403)"),
    404: (Status.ERROR, "There is no such endpoint (404)"),
    429: (Status.RATE_LIMITED, "It is being asked too often (429)"),
}
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,63}")
SENTENCES = {
    Status.ACCESS_DENIED: "It denied access by policy",
    Status.RATE_LIMITED: "Its policy limits how often it may be asked",
    Status.POLICY_VIOLATION: "The question is against its policy",
    Status.PAYMENT_FAILED: "It asks for payment",
}


class SpaceMessage(Value):
    content: str | None = None


class Summary(Value):
    message: SpaceMessage | None = None


def call(
    endpoint: Endpoint, payload: dict[str, Any], context: Context, outbound: Outbound
) -> AbstractAsyncContextManager[Exchange]:
    """Call an endpoint, with its owner's tokens only."""
    transaction = context.transactions.get(endpoint.owner) if endpoint.owner else None
    if transaction:
        payload["transaction_token"] = transaction
    return outbound.request(
        "POST",
        _url(endpoint),
        headers=headers(endpoint, context),
        body=msgspec.json.encode(payload),
        operator=endpoint.operator,
        public_only=endpoint.public_only,
    )


def headers(endpoint: Endpoint, context: Context) -> dict[str, str]:
    sent = {"Content-Type": "application/json", "X-Correlation-ID": context.correlation_id}
    if endpoint.tenant:
        sent["X-Tenant-Name"] = _sendable(endpoint.tenant, "tenant name")
    token = endpoint.token or (context.tokens.get(endpoint.owner) if endpoint.owner else None)
    if token:
        sent["Authorization"] = f"Bearer {_sendable(token, 'token')}"
    if context.traceparent:
        sent["traceparent"] = context.traceparent
        if context.tracestate:
            sent["tracestate"] = context.tracestate
    return sent


def base(url: str) -> str:
    """The part of a URL that paths are appended to."""
    if not url:
        raise UpstreamError("The endpoint has no URL, and no endpoint of its name is configured for this caller.")
    if "?" in url or "#" in url:
        raise UpstreamError("The endpoint's URL is not usable: it must end before any '?' or '#'.")
    return url.rstrip("/")


def _url(endpoint: Endpoint) -> str:
    if endpoint.slug in ("", ".", ".."):
        raise UpstreamError("The endpoint's slug is not usable.")
    return f"{base(endpoint.url)}/api/v1/endpoints/{quote(endpoint.slug, safe='')}/query"


def _sendable(value: str, what: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise UpstreamError(f"The {what} for this endpoint holds characters that cannot be sent.")
    return value


async def refusal(exchange: Exchange) -> tuple[Status, str]:
    """The status and message for a reply other than 200; the message quotes the upstream's reason if it is plain."""
    if 300 <= exchange.status < 400:
        return Status.ERROR, "It answered with a redirect, which is not followed."
    body: object = None
    if exchange.content_type == "application/json" or exchange.content_type.endswith("+json"):
        # The status counts without the body: a 401 whose body breaks off is still a 401.
        with suppress(UpstreamError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = await decoded(await exchange.read(), msgspec.json.decode)
    status, sentence = REFUSALS.get(exchange.status, (Status.ERROR, f"It answered with an error ({exchange.status})"))
    policy = _field(body, "policy_metadata") or _field(_field(body, "detail"), "policy_metadata")
    if outcome := OUTCOMES.get(str(_field(policy, "outcome"))):
        status, sentence = outcome, SENTENCES[outcome]
    why = reason(body)
    return status, f"{sentence}: {why}" if why else f"{sentence}."


def with_hint(message: str, hint: str | None) -> str:
    """The message and, if there is one, a sentence that says what to do about it."""
    return f"{message.rstrip('.')}. {hint}" if hint else message


def key_needed(endpoint: Endpoint) -> str:
    """What to do if an endpoint asks for a key: only its owner can give one."""
    owner = endpoint.owner if endpoint.owner and NAME.fullmatch(endpoint.owner) else None
    named = "" if owner else ", with the owner's name (OWNER@URL/slug or owner_username)"
    return (
        f"Ask {owner or 'its owner'} for a key, and give it with --token {owner or 'OWNER'}=KEY (command line), in "
        f"endpoint_tokens (chat API) or as token (anabranch.yaml){named}."
    )


def failure_kind(status: int) -> FailureKind:
    """What a status other than 200 says about the upstream. What a bad token, slug or question can cause is not its
    failure: otherwise one caller could open the circuit for all."""
    if status >= 500:
        return FailureKind.DOWN
    return FailureKind.BUSY if status == 429 else FailureKind.REQUEST


def reason(body: object, most: int = MAX_QUOTED) -> str:
    """The upstream's error message, if it is plain: one line of bounded length, no markup."""
    for candidate in (_field(body, "detail"), _field(body, "message"), _field(body, "error")):
        text = candidate if isinstance(candidate, str) else _field(candidate, "message")
        if isinstance(text, str) and text.strip() and "<" not in text:
            return quoted(text, most=most)
    return ""


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None
