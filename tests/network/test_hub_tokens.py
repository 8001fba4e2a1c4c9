"""Tokens that the hub issues: which are accepted, and when its keys are fetched."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.errors import Unauthorized
from anabranch.network.addresses import AddressGuard
from anabranch.network.hub_tokens import HubTokens
from anabranch.network.outbound import AiohttpOutbound
from anabranch.testing import Failure, Hub, ManualClock
from support.examples import examples

TTL_S = 3600.0
NOT_THE_HUBS = "not one that the hub has signed"
NOT_PUBLISHED = "does not publish"
NOT_NOW = "cannot be fetched now"


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub(signing=True) as started:
        yield started


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000.0)


@pytest.fixture
async def outbound() -> AsyncIterator[AiohttpOutbound]:
    created = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=100_000)
    yield created
    await created.close()


@pytest.fixture
def tokens(hub: Hub, outbound: AiohttpOutbound, clock: ManualClock) -> HubTokens:
    return HubTokens(f"{hub.url}/", outbound, clock, TTL_S)


async def refused(tokens: HubTokens, token: str, why: str, audiences: tuple[str, ...] = ("alice",)) -> None:
    with pytest.raises(Unauthorized, match=why):
        await tokens.verify(token, audiences)


def encoded(part: Any) -> str:
    raw = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# --- whom a token stands for


async def test_a_hub_token_identifies_its_bearer(hub: Hub, tokens: HubTokens) -> None:
    token = hub.token("alice", sub="17", role="user", groups=["staff", 7])
    bearer = await tokens.verify(token, ("bob", "alice"))
    assert (bearer.user, bearer.groups, bearer.audiences) == ("17", ("staff", "7"), ("alice",))
    named = hub.token("alice", sub="17", username="carol", preferred_username="caro")
    assert (await tokens.verify(named, ("alice",))).user == "carol"
    several = hub.sign({"aud": ["zoe", "bob", "alice"], "exp": time.time() + 60, "sub": "17"})
    assert (await tokens.verify(several, ("alice", "bob"))).audiences == ("bob", "alice")
    assert hub.key_requests == 1


@pytest.mark.parametrize(
    "claims", [{}, {"sub": "guest"}, {"sub": ""}, {"sub": "17", "role": "guest"}, {"sub": "guest", "username": "root"}]
)
async def test_a_guest_token_has_no_user(hub: Hub, tokens: HubTokens, claims: dict[str, Any]) -> None:
    bearer = await tokens.verify(hub.token("alice", **claims, groups=["staff"]), ("alice",))
    assert (bearer.user, bearer.groups) == (None, ())


async def test_the_stub_hub_signs_tokens_only_with_signing_enabled() -> None:
    async with Hub() as plain:
        with pytest.raises(RuntimeError, match="signing=True"):
            plain.token("alice")
        outbound = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=100_000)
        async with Hub(signing=True) as hub:
            await refused(HubTokens(plain.url, outbound, ManualClock(), TTL_S), hub.token("alice"), NOT_NOW)
        await outbound.close()


# --- which tokens are refused


async def test_a_hub_token_for_another_audience_is_refused(hub: Hub, tokens: HubTokens) -> None:
    for audience in ("bob", "ALICE", "alice ", "alic", "alicee", ["bob"]):
        token = hub.sign({"aud": audience, "exp": time.time() + 60, "sub": "17"})
        await refused(tokens, token, "for another audience")
    await refused(tokens, hub.token("alice"), "for another audience", ())


async def test_an_expired_or_future_hub_token_is_refused(hub: Hub, tokens: HubTokens) -> None:
    await refused(tokens, hub.token("alice", sub="17", expires_s=-31), "expired")
    await refused(tokens, hub.token("alice", sub="17", nbf=time.time() + 60), "not valid yet")
    await refused(tokens, hub.token("alice", sub="17", iat=time.time() + 60), "not valid yet")
    # Clocks may differ a little.
    await tokens.verify(hub.token("alice", sub="17", expires_s=-20), ("alice",))
    await tokens.verify(hub.token("alice", sub="17", nbf=time.time() + 20), ("alice",))


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "alice"},
        {"exp": 2**33},
        {"aud": None, "exp": 2**33},
        {"aud": "alice", "exp": None},
        {"aud": "alice", "exp": "soon"},
        {"aud": "alice", "exp": float("inf")},
        {"aud": "alice", "exp": float("nan")},
        {"aud": [], "exp": 2**33},
        {"aud": [["alice"]], "exp": 2**33},
        {"aud": {"alice": 1}, "exp": 2**33},
        {"aud": "alice", "exp": 2**33, "sub": 17},
        {"aud": "alice", "exp": 2**33, "iat": "now"},
    ],
    ids=str,
)
async def test_missing_or_invalid_token_claims_are_refused(hub: Hub, tokens: HubTokens, claims: dict[str, Any]) -> None:
    await refused(tokens, hub.sign(claims), "token is")


async def test_other_signature_algorithms_are_refused(hub: Hub, tokens: HubTokens) -> None:
    """Above all not `none`, and not HS256 with the public key for a secret. The hub need not be asked for that."""
    (public,) = hub.keys
    key = jwt.PyJWK(public).key
    secrets = [
        key.public_bytes(serialization.Encoding.PEM, form)
        for form in (serialization.PublicFormat.SubjectPublicKeyInfo, serialization.PublicFormat.PKCS1)
    ] + [json.dumps(public).encode(), public["n"].encode(), b""]
    claims = {"aud": "alice", "exp": 2**33, "sub": "root"}
    for algorithm in ("none", "None", "nOnE", "HS256", "RS384", "RS512", "PS256", "ES256", "", None, 5, ["RS256"]):
        head = encoded({"alg": algorithm, "typ": "JWT", "kid": public["kid"]})
        await refused(tokens, f"{head}.{encoded(claims)}.", NOT_THE_HUBS)
        for secret in secrets:
            hashed = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
            signature = hashed.sign(f"{head}.{encoded(claims)}".encode(), secret)
            await refused(tokens, f"{head}.{encoded(claims)}.{encoded(signature)}", NOT_THE_HUBS)
    assert hub.key_requests == 0


async def test_a_token_signed_with_another_key_under_the_hubs_key_id_is_refused(hub: Hub, tokens: HubTokens) -> None:
    async with Hub(signing=True) as other:
        assert other.keys[0]["kid"] == hub.keys[0]["kid"]
        await refused(tokens, other.token("alice", sub="root"), NOT_THE_HUBS)
        # A token that brings its key along, or says where it is, is not believed.
        claims = {"aud": "alice", "exp": 2**33, "sub": "root"}
        for header in (
            {"jwk": other.keys[0]},
            {"jku": f"{other.url}/.well-known/jwks.json"},
            {"x5u": f"{other.url}/.well-known/jwks.json"},
            {"x5c": ["AAAA"]},
        ):
            await refused(tokens, other.sign(claims, header), NOT_THE_HUBS)
        assert other.key_requests == 0


@pytest.mark.parametrize(
    "identifier", ["key-9", "../key-1", "KEY-1", " key-1", "key-1\x00", "' OR 1=1 --", "x" * 4_000]
)
async def test_a_token_signed_with_an_unpublished_key_is_refused(hub: Hub, tokens: HubTokens, identifier: str) -> None:
    token = hub.sign({"aud": "alice", "exp": 2**33, "sub": "17"}, {"kid": identifier})
    await refused(tokens, token, NOT_PUBLISHED)


async def test_a_token_without_a_key_id_is_checked_with_the_only_key(hub: Hub, tokens: HubTokens) -> None:
    """As long as there is one key, it can only be that."""
    nameless = {"aud": "alice", "exp": 2**33, "sub": "17"}
    assert (await tokens.verify(hub.sign(nameless, {"kid": ""}), ("alice",))).user == "17"
    async with Hub(signing=True) as other:
        await refused(tokens, other.sign(nameless, {"kid": ""}), NOT_THE_HUBS)
    hub.rotate(keep=True)
    await tokens.verify(hub.token("alice"), ("alice",))
    await refused(tokens, hub.sign(nameless, {"kid": ""}), NOT_PUBLISHED)


async def test_a_modified_token_is_refused(hub: Hub, tokens: HubTokens) -> None:
    head, body, signature = hub.token("alice", sub="17").split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    for changed in ({"sub": "root"}, {"exp": 2**33}, {"aud": "bob"}, {"groups": ["board"]}):
        await refused(tokens, f"{head}.{encoded({**claims, **changed})}.{signature}", NOT_THE_HUBS, ("alice", "bob"))
    for broken in (signature[:-8], "", "A" * len(signature), signature + "AAAA", signature[::-1]):
        await refused(tokens, f"{head}.{body}.{broken}", NOT_THE_HUBS)
    await refused(tokens, f"{head}.{signature}.{body}", NOT_THE_HUBS)
    other_head = encoded({"alg": "RS256", "typ": "JWT", "kid": hub.keys[0]["kid"], "b64": False, "crit": ["b64"]})
    await refused(tokens, f"{other_head}.{body}.{signature}", NOT_THE_HUBS)


@pytest.mark.parametrize(
    "token",
    [
        "..",
        "a.b.c",
        "ä.ö.ü",
        "\x00.\x00.\x00",
        "%2e.%2e.%2e",
        encoded(b"[" * 5_000) + "..",
        encoded(b'{"alg": "RS256", "kid": ' + b"[" * 5_000) + "..",
        encoded(b'{"alg": "RS256", "kid": ' + b"9" * 5_000 + b"}") + "..",
        encoded({"alg": "RS256", "kid": 7}) + ".e30.e30",
        encoded({"alg": "RS256", "kid": ["key-1"]}) + ".e30.e30",
        encoded({"alg": "RS256", "kid": None}) + ".e30.e30",
        encoded([]) + ".e30.e30",
        encoded(b"\xff\xfe") + ".e30.e30",
        encoded({"alg": "RS256", "kid": "key-1"}) + "." + encoded(b"[" * 5_000) + ".e30",
        encoded({"alg": "RS256", "kid": "key-1"}) + ".e30." + "=" * 100,
    ],
    ids=lambda token: repr(token[:40]),
)
async def test_a_malformed_token_is_refused(hub: Hub, tokens: HubTokens, token: str) -> None:
    await refused(tokens, token, "token is")


async def test_a_token_over_the_length_limit_is_refused(hub: Hub, tokens: HubTokens) -> None:
    await refused(tokens, hub.token("alice", sub="17", padding="x" * 8_000), "too long")
    assert hub.key_requests == 0


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=3, max_size=3), st.text(max_size=40))
def test_forged_tokens_are_refused(parts: list[bytes], text: str) -> None:
    async def verify(token: str) -> None:
        outbound = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=1)
        try:
            await refused(HubTokens("http://127.0.0.1:9", outbound, ManualClock(), TTL_S), token, "token")
        finally:
            await outbound.close()

    asyncio.run(verify(".".join(encoded(part) for part in parts)))
    asyncio.run(verify(f"{text}.{text}.{text}"))


# --- what the hub is asked


async def test_hub_keys_are_cached_for_their_ttl(hub: Hub, tokens: HubTokens, clock: ManualClock) -> None:
    token = hub.token("alice", expires_s=10_000)
    for passed_s, asked in ((0, 1), (TTL_S, 1), (1, 2), (TTL_S, 2), (1, 3)):
        clock.advance(passed_s)
        await tokens.verify(token, ("alice",))
        assert hub.key_requests == asked


async def test_a_withdrawn_hub_key_is_valid_until_the_cache_expires(
    hub: Hub, tokens: HubTokens, clock: ManualClock
) -> None:
    token = hub.token("alice")
    await tokens.verify(token, ("alice",))
    hub.rotate()
    await tokens.verify(token, ("alice",))
    clock.advance(TTL_S + 1)
    await refused(tokens, token, NOT_PUBLISHED)


@pytest.mark.parametrize("keep", [True, False])
async def test_an_unknown_key_id_refreshes_the_hub_keys(hub: Hub, tokens: HubTokens, keep: bool) -> None:
    old = hub.token("alice")
    await tokens.verify(old, ("alice",))
    hub.rotate(keep=keep)
    await tokens.verify(hub.token("alice"), ("alice",))
    assert hub.key_requests == 2
    if keep:
        await tokens.verify(old, ("alice",))
    else:
        await refused(tokens, old, NOT_PUBLISHED)


async def test_unknown_key_ids_cannot_flood_the_hub(hub: Hub, tokens: HubTokens, clock: ManualClock) -> None:
    claims = {"aud": "alice", "exp": 2**33}
    await tokens.verify(hub.token("alice"), ("alice",))
    made_up = [hub.sign(claims, {"kid": f"made-up-{number}"}) for number in range(20)]
    await asyncio.gather(*(refused(tokens, token, NOT_PUBLISHED) for token in made_up))
    assert hub.key_requests == 1 + 5
    await tokens.verify(hub.token("alice"), ("alice",))
    hub.rotate()
    fresh = hub.token("alice")
    await refused(tokens, fresh, NOT_PUBLISHED)
    clock.advance(60)
    await tokens.verify(fresh, ("alice",))
    assert hub.key_requests == 1 + 5 + 1


async def test_concurrent_token_checks_share_one_key_request(hub: Hub, tokens: HubTokens) -> None:
    token = hub.token("alice")
    await asyncio.gather(*(tokens.verify(token, ("alice",)) for _ in range(20)))
    assert hub.key_requests == 1


@pytest.mark.parametrize(
    "failure",
    [
        *(Failure.STATUS_500, Failure.STATUS_404, Failure.HTML, Failure.BAD_JSON),
        *(Failure.WRONG_SHAPE, Failure.REDIRECT, Failure.HUGE, Failure.INVALID_UTF8),
    ],
)
async def test_cached_hub_keys_survive_a_hub_outage(
    hub: Hub, tokens: HubTokens, clock: ManualClock, failure: Failure
) -> None:
    token = hub.token("alice", sub="17")
    hub.fails(failure)
    for _ in range(3):  # at first nobody gets in, and the hub is circuit is open for a while
        await refused(tokens, token, NOT_NOW)
    assert hub.key_requests == 1
    hub.fails(None)
    clock.advance(10)
    await tokens.verify(token, ("alice",))
    hub.fails(failure)  # later, the keys that are known go on
    clock.advance(TTL_S + 1)
    for _ in range(3):
        await tokens.verify(token, ("alice",))
    assert hub.key_requests == 3
    await refused(tokens, hub.sign({"aud": "alice", "exp": 2**33}, {"kid": "new"}), NOT_NOW)
    hub.fails(None)
    clock.advance(10)
    await tokens.verify(token, ("alice",))
    assert hub.key_requests == 4


async def test_an_unreachable_hub_refuses_tokens(outbound: AiohttpOutbound, clock: ManualClock) -> None:
    async with Hub(signing=True) as hub:
        url, token = hub.url, hub.token("alice")
    await refused(HubTokens(url, outbound, clock, TTL_S), token, NOT_NOW)


async def test_a_hub_that_hangs_times_out(hub: Hub, outbound: AiohttpOutbound, clock: ManualClock) -> None:
    tokens = HubTokens(hub.url, outbound, clock, TTL_S, fetch_timeout_s=0.05)
    token = hub.token("alice")
    await tokens.verify(token, ("alice",))
    hub.fails(Failure.HANG)
    clock.advance(TTL_S + 1)
    await asyncio.gather(*(tokens.verify(token, ("alice",)) for _ in range(20)))
    assert hub.key_requests == 2


async def test_invalid_hub_keys_are_ignored(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Hub(signing=True) as hub:
        good = hub.keys[0]
        published = [
            {},
            {"kty": "RSA"},
            {**good, "kid": "a", "n": 5},
            {**good, "kid": "b", "n": "!"},
            {**good, "kid": "c", "e": ""},
            {**good, "kid": "d", "use": "enc"},
            {**good, "kid": "e", "alg": "RS512"},
            {**good, "kid": "f", "kty": "oct", "k": "AAAA"},
            {**good, "kid": "g", "kty": ["RSA"]},
            good,
        ]
        monkeypatch.setattr(Hub, "keys", property(lambda _: published))
        outbound = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=100_000)
        tokens = HubTokens(hub.url, outbound, clock, TTL_S)
        assert (await tokens.verify(hub.token("alice", sub="17"), ("alice",))).user == "17"
        for name in "abcdefg":
            await refused(tokens, hub.sign({"aud": "alice", "exp": 2**33}, {"kid": name}), NOT_PUBLISHED)
        await outbound.close()
