"""Redaction: which encodings of a secret are removed, what counts as a secret, and for how long."""

import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch import Anabranch
from anabranch.configuration.settings import SECRET, Settings, secrets_of
from anabranch.domain.mcp import McpServer
from anabranch.network import redaction
from anabranch.network.redaction import REMOVED, Secrets, of_server, quoted, removed

KEY = 'sk-"proj"/7f3a+91bc55de08aa=='
TOKEN = "sat-7f3a91bc55de08aa"
LONG = "eyJ" + "0123456789abcdef" * 100


def written(key: str) -> tuple[str, ...]:
    """The ways in which an upstream may write a key."""
    in_url = quote(key, safe="")
    in_lower_case = re.sub("%..", lambda found: found[0].lower(), in_url)
    return (key, in_url, in_lower_case, quote(key), quote_plus(key), json.dumps(key)[1:-1])


@pytest.mark.parametrize("key", [KEY, TOKEN, LONG, "pässwört", "p@ss wörd/+%", "two\nlines", "sixsix"])
def test_redaction_finds_a_key_in_every_encoding(key: str) -> None:
    own = Secrets([key])
    for said in written(key):
        assert removed(f"Bearer {said}, try again", own) == f"Bearer {REMOVED}, try again"
    assert removed(f"Bearer {key}.") == f"Bearer {key}.", "a secret of nobody"


@pytest.mark.parametrize("key", [KEY, TOKEN, LONG, "pässwört", "sixsix"])
@pytest.mark.parametrize("user", ["", "u", "us", "user"])
@pytest.mark.parametrize("coded", [b64encode, urlsafe_b64encode])
def test_redaction_finds_a_key_inside_base64(key: str, user: str, coded: Callable[[bytes], bytes]) -> None:
    said = removed(f"Basic {coded(f'{user}:{key}'.encode()).decode()}", Secrets([key]))
    assert REMOVED in said
    assert len(said) <= len(f"Basic {REMOVED}") + 2 * len(user) + 6


def test_redaction_ignores_short_secrets() -> None:
    assert removed("the model is EMPTY, and a.b", Secrets(["EMPTY", "a", ""])) == "the model is EMPTY, and a.b"


@given(before=st.integers(0, 1_400), key=st.sampled_from([KEY, LONG, TOKEN]), gap=st.sampled_from(["x", " "]))
def test_redaction_removes_the_start_of_a_truncated_key(before: int, key: str, gap: str) -> None:
    said = quoted(gap * before + key + gap * 2_000, Secrets([key]))
    assert key[:6] not in said
    assert len(said) <= 300


@pytest.mark.parametrize("name", SECRET)
def test_redaction_knows_every_secret_setting(name: str) -> None:
    values = {
        "redis_url": f"redis://me:{TOKEN}@localhost:6379/0",
        "database_url": f"postgresql://me:{TOKEN}@localhost:6379/records",
        "index_url": f"https://me:{TOKEN}@localhost:9200/docs",
        "otlp_headers": f"a=b,authorization=Bearer%20{TOKEN}",
    }
    settings = msgspec.structs.replace(Settings(), **{name: values.get(name, TOKEN)})
    assert removed(f"a {TOKEN} b", Secrets(secrets_of(settings))) == f"a {REMOVED} b"
    assert removed("localhost:6379 authorization Bearer", Secrets(secrets_of(settings))) == (
        "localhost:6379 authorization Bearer"
    )


def test_redaction_knows_a_password_in_a_parameter() -> None:
    settings = Settings(database_url=f"postgresql://localhost:5432/records?user=me&password={TOKEN}&sslmode=require")
    assert removed(f"a {TOKEN} localhost:5432", Secrets(secrets_of(settings))) == f"a {REMOVED} localhost:5432"


def test_texts_of_other_upstreams_lose_only_named_secrets_of_mcp_servers() -> None:
    basic = b64encode(f"me:{TOKEN}".encode()).decode()
    env = {"GITHUB_TOKEN": "ghp_0123456789", "FOLDER": "/srv/handbook", "DB": "pg://me:hunter22@db.example/x"}
    docs = McpServer(name="docs", command="x", args=("--api-key", "args-key-1", "--root", "/srv/books"), env=env)
    site = McpServer(
        name="site", url="https://x.example/mcp", headers={"Authorization": f"Basic {basic}", "X-Mode": "fastest"}
    )
    certain = Secrets(part for server in (docs, site) for part in of_server(server, certain=True))
    said = f"ghp_0123456789 /srv/handbook hunter22 db.example args-key-1 /srv/books Basic {TOKEN} fastest"
    assert removed(said, certain) == (
        f"{REMOVED} /srv/handbook {REMOVED} db.example {REMOVED} /srv/books Basic {REMOVED} fastest"
    )


async def test_redaction_forgets_secrets_when_their_owner_closes(tmp_path: Path) -> None:
    server = McpServer(name="docs", command="x", env={"API_KEY": KEY})
    settings = Settings(data_dir=str(tmp_path), model_url="http://127.0.0.1:9", model_api_key=TOKEN)
    async with Anabranch.open(settings=settings) as opened:
        await opened.reconfigure({"docs": server}, settings.aggregation)
        assert removed(f"{TOKEN} {KEY}") == f"{REMOVED} {REMOVED}"
    assert removed(f"{TOKEN} {KEY}") == f"{TOKEN} {KEY}"
    assert redaction.in_content() == ()
