"""`anabranch ask` and `serve` as processes: output, error messages and exit codes."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from anabranch.testing import Document, Hub, Space
from support.cli_runner import MEDDLING, Ran, Run, here

QUESTION = "What is an anabranch?"
PATIENCE_S = 20
STREAMING = {"AGGREGATOR_MODEL_STREAMING_ENABLED": "true"}
ONCE = {"AGGREGATOR_MODEL_RETRIES": "0"}
Inside = Callable[..., Awaitable[Ran]]
# For what must be refused before anybody is asked.
NOBODY = "http://127.0.0.1:1"


@asynccontextmanager
async def started(
    *arguments: str, home: Path, stdout: int = asyncio.subprocess.PIPE, variables: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(MEDDLING)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "anabranch", *arguments),
        env={**inherited, "AGGREGATOR_DATA_DIR": str(home / "data"), **(variables or {})},
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        # Whoever runs the tests in the background may have it ignored, and a child inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Cli:
    """Runs the program in an empty folder."""

    def __init__(self, home: Path) -> None:
        self.home = home

    async def __call__(self, *arguments: str, **variables: str) -> Ran:
        async with started(*arguments, home=self.home, variables=variables) as process:
            out, err = await process.communicate()
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The same, where nothing but the words and the code matter."""
    yield from here(tmp_path / "data", monkeypatch, capsys)


@pytest.fixture
def inside(run: Run) -> Inside:
    """That in a thread, beside the servers that it asks."""
    return partial(asyncio.to_thread, run)


def rows(text: str) -> dict[str, list[str]]:
    """The table's lines: path -> sign, documents, ms, status."""
    found = re.findall(r"^([✓✗])  (\S+) +(\d+) +(\d+)  (.*?) *$", text, re.MULTILINE)
    return {path: [sign, documents, ms, status] for sign, path, documents, ms, status in found}


def said(ran: Ran) -> str:
    """The one sentence that a mistake gets, on standard error."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("anabranch: ")
    assert ran.err.endswith(".\n")
    assert ran.err.count("\n") == 1, ran.err
    return ran.err.removeprefix("anabranch: ").strip()


# --- answers


async def test_ask_prints_the_answer_and_its_sources(cli: Cli, space: Space) -> None:
    ran = await cli("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/scribe")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("An anabranch is a section of a river that leaves the main stem")
    assert rows(ran.out)["docs"][:2] == ["✓", "3"]
    assert rows(ran.out)["docs"][3] == "success"
    assert "What an anabranch is" in ran.out
    assert re.search(r"\d+ ms in all · \d+ ms asking sources · \d+ ms scribe · \d+ tokens", ran.out)


async def test_ask_prints_the_latency_of_each_source(inside: Inside, space: Space) -> None:
    space.source("slow", documents=[Document(title="T", content="Slow words.")], delay_s=0.3)
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/slow", "-s", f"{space.url}/docs", "--retrieve")
    assert int(rows(ran.out)["slow"][2]) >= 300
    assert int(rows(ran.out)["docs"][2]) < 300


async def test_ask_prints_the_error_of_a_failed_source_and_still_answers(inside: Inside, space: Space) -> None:
    sources = [f"{space.url}/docs", f"{space.url}/status-403", f"{space.url}/nobody"]
    ran = await inside("ask", QUESTION, *(word for url in sources for word in ("-s", url)), "-m", f"{space.url}/scribe")
    assert ran.code == 0
    assert "[docs]" in ran.out
    table = rows(ran.out)
    assert table["docs"][3] == "success"
    assert table["status-403"][:2] == ["✗", "0"]
    assert table["status-403"][3] == "access_denied"
    assert table["nobody"][3] == "error"
    assert "status-403: It denied access (403): Forbidden" in ran.out
    assert "nobody: There is no such endpoint (404)" in ran.out


async def test_ask_json_prints_one_document(cli: Cli, space: Space) -> None:
    ran = await cli("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/scribe", "--json")
    assert (ran.code, ran.err) == (0, "")
    answer = json.loads(ran.out)
    assert answer["text"].startswith("An anabranch is")
    assert [reply["path"] for reply in answer["replies"]] == ["docs"]
    citation = answer["citations"][0]
    assert answer["text"][citation["start"] : citation["end"]] == "[docs]"


async def test_ask_names_the_sentences_that_no_source_supports(inside: Inside, space: Space) -> None:
    space.source("policies", documents=[Document(title="Refunds", content="Refunds take 30 days. Labels are free.")])
    space.model("writer", reply="Refunds take 30 days [1]. Labels are free. Penguins swim very well [1].")
    asked = ("ask", "What about refunds?", "-s", f"{space.url}/policies", "-m", f"{space.url}/writer")
    ran = await inside(*asked)
    assert ran.code == 0
    assert "✗ No source says this: “Penguins swim very well [1].”" in ran.out
    assert "[1]: “Labels are free.”" in ran.out
    assert "faithfulness 0.67 (2 supported, 1 unsupported)\ncitation marks: 1 removed, 1 added\n" in ran.out
    assert "faithfulness" not in (await inside(*asked, "--no-verify")).out
    strict = await inside(*asked, "--strict")
    assert "Penguins" not in strict.out
    assert "One sentence that no source supports was left out." in strict.out
    answer = json.loads((await inside(*asked, "--json")).out)
    assert [one["verdict"] for one in answer["sentences"]] == ["supported", "supported", "unsupported"]
    assert answer["faithfulness"] == 0.6667


def test_ask_strict_cannot_be_used_with_no_verify(run: Run) -> None:
    ran = run("ask", QUESTION, "--strict", "--no-verify")
    assert (ran.code, "cannot be used with" in ran.err) == (2, True)


async def test_ask_json_of_a_failure(inside: Inside, space: Space) -> None:
    model = ("-m", f"{space.url}/status-500")
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/docs", *model, "--json", "--no-fallback", **ONCE)
    assert ran.code == 1
    assert json.loads(ran.out)["code"] == "generation_failed"


async def test_ask_retrieve_prints_passages_and_calls_no_model(inside: Inside, space: Space) -> None:
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/docs", "--retrieve")
    assert ran.code == 0
    assert "0.92 What an anabranch is" in ran.out
    assert "leaves the main stem" in ran.out
    assert [request.slug for request in space.requests] == ["docs"]


async def test_ask_top_k_limits_documents_per_source(inside: Inside, space: Space) -> None:
    await inside("ask", QUESTION, "-s", f"{space.url}/docs", "--retrieve", "-k", "2")
    assert space.requests[0].body["limit"] == 2


async def test_ask_sends_tokens_only_to_their_owner(inside: Inside, space: Space, tmp_path: Path) -> None:
    shelf = [Document(title="Doc", content="Guarded words.")]
    space.source("mine", documents=shelf, token="sat-alice")
    space.source("yours", documents=shelf, token="sat-bob")
    (tmp_path / "token").write_text("sat-bob\n", encoding="utf-8")
    sources = ("-s", f"alice@{space.url}/mine", "-s", f"bob@{space.url}/yours", "-s", f"{space.url}/docs")
    ran = await inside("ask", QUESTION, *sources, "--token", "alice=sat-alice", "-t", "bob=@token", "--retrieve")
    assert {path: row[3] for path, row in rows(ran.out).items()} == {
        "alice/mine": "success",
        "bob/yours": "success",
        "docs": "success",
    }
    sent = {request.slug: request.headers.get("Authorization") for request in space.requests}
    assert sent == {"mine": "Bearer sat-alice", "yours": "Bearer sat-bob", "docs": None}
    assert "sat-" not in ran.out + ran.err


async def test_ask_resolves_names_on_the_hub(inside: Inside, space: Space) -> None:
    async with Hub() as hub:
        hub.publish(owner="alice", slug="docs", url=space.url, type="data_source")
        ran = await inside(
            *("ask", QUESTION, "-s", "alice/docs", "--retrieve"),
            AGGREGATOR_SYFTHUB_URL=hub.url,
            AGGREGATOR_ENDPOINT_ALLOWLIST="127.0.0.0/8",
        )
        assert ran.code == 0
        assert rows(ran.out)["alice/docs"][3] == "success"
        missing = await inside("ask", QUESTION, "-s", "alice/nothing", "--retrieve", AGGREGATOR_SYFTHUB_URL=hub.url)
    assert "'alice/nothing'" in said(missing)


async def test_ask_uses_configured_sources_and_model_by_default(inside: Inside, space: Space, tmp_path: Path) -> None:
    config = f"""
        sources:
          rivers: {{url: "{space.url}", slug: docs, owner: alice}}
        models:
          writer: {{url: "{space.url}", slug: scribe}}
    """
    (tmp_path / "anabranch.yaml").write_text(config, encoding="utf-8")
    ran = await inside("ask", QUESTION)
    assert ran.code == 0
    assert list(rows(ran.out)) == ["alice/docs"]
    named = await inside("ask", QUESTION, "-s", "rivers", "-m", "writer", "--config", "anabranch.yaml")
    assert named.code == 0


async def test_ask_without_a_model_answers_extractively(inside: Inside, space: Space) -> None:
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/docs")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("An anabranch is a section of a river")
    assert re.search(r"^\[1\] What an anabranch is · docs$", ran.out, re.MULTILINE)
    assert re.search(r"ms extractive · support \d\.\d\d$", ran.out, re.MULTILINE)


async def test_ask_without_anything_to_ask_says_how_to_add_documents(cli: Cli) -> None:
    asked, retrieved = await cli("ask", QUESTION), await cli("ask", QUESTION, "--retrieve")
    assert (asked.code, asked.err, retrieved.code) == (3, "", 3)
    for text in (asked.out, retrieved.err):
        assert text.startswith("There are no documents here that you can read")
        assert "anabranch ingest FOLDER --collection NAME" in text
        assert "POST /v1/ingest" in text
    assert not (cli.home / "data").exists()


async def test_ask_without_names_asks_mcp_servers_too(inside: Inside, space: Space, tmp_path: Path) -> None:
    stub = Path(__file__).parents[2] / "support" / "mcp_stub_server.py"
    config = {
        "sources": {"rivers": {"url": space.url, "slug": "docs", "owner": "alice"}},
        "mcpServers": {"notes": {"command": sys.executable, "args": ["-I", "-S", str(stub), "notes", "0"]}},
        "aggregator": {"serverTimeoutSecs": 30},
    }
    (tmp_path / "anabranch.yaml").write_text(json.dumps(config), encoding="utf-8")
    ran = await inside("ask", QUESTION)
    assert ran.code == 0
    assert list(rows(ran.out)) == ["alice/docs", "notes"]


async def test_ask_names_the_configured_default_model(inside: Inside, space: Space, tmp_path: Path) -> None:
    config = f'models:\n  writer: {{url: "{space.url}", slug: scribe}}\n'
    (tmp_path / "anabranch.yaml").write_text(config, encoding="utf-8")
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/docs", "-m", "default", "--json")
    assert (ran.code, json.loads(ran.out)["model"]) == (0, "scribe")
    unknown = await inside("ask", QUESTION, "-s", f"{space.url}/docs", "-m", "nobody")
    assert "(extractive, default, writer)" in unknown.err


async def test_ask_exits_3_if_nothing_is_found(inside: Inside, space: Space) -> None:
    space.source("empty")
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/empty", "-m", f"{space.url}/scribe")
    assert ran.code == 3
    assert ran.out.startswith("Nothing that answers this was found")
    assert [request.slug for request in space.requests] == ["empty"]
    assert (await inside("ask", QUESTION, "-s", f"{space.url}/empty", "--retrieve")).code == 3


async def test_ask_exits_1_if_all_sources_fail(inside: Inside, space: Space) -> None:
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/status-500", "-m", f"{space.url}/scribe")
    assert ran.code == 1
    assert "The source did not answer, so there is nothing to answer from." in ran.out
    assert "status-500: It answered with an error (500)" in ran.out
    assert rows(ran.out)["status-500"][0] == "✗"
    assert (await inside("ask", QUESTION, "-s", f"{space.url}/status-500", "--retrieve")).code == 1


async def test_ask_exits_1_if_the_model_fails_without_fallback(cli: Cli, space: Space) -> None:
    asked = ("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/status-500", "--no-fallback")
    ran = await cli(*asked, **ONCE)
    assert (ran.code, ran.out) == (1, "")
    assert "Model generation failed" in ran.err
    assert rows(ran.err)["docs"][3] == "success"


async def test_ask_prints_partial_answer_and_error_of_an_aborted_model(cli: Cli, space: Space) -> None:
    ran = await cli(
        *("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/stream-break"),
        **STREAMING,
    )
    assert ran.code == 1
    assert ran.out.strip() == "Two words"
    assert "Model generation failed" in ran.err


# --- what goes into a pipe


async def test_a_pipe_gets_no_escape_codes_and_no_progress(cli: Cli, space: Space) -> None:
    sources = ("-s", f"{space.url}/docs", "-s", f"{space.url}/status-500")
    ran = await cli("ask", QUESTION, *sources, "-m", f"{space.url}/scribe", TERM="xterm-256color")
    assert "\x1b" not in ran.out + ran.err
    assert "asking" not in ran.out.replace("ms asking sources", "") + ran.err
    assert "is writing" not in ran.out + ran.err


async def test_control_characters_in_answers_are_not_printed(inside: Inside, space: Space) -> None:
    """A document or a model that clears the screen, renames the window or hides text is shown, not obeyed."""
    trick = "\x1b[2J\x1b]0;pwned\x07 hidden \x9b31m red\rover"
    space.source("evil", documents=[Document(title=f"T {trick}", content=f"Words {trick} and more.")])
    space.model("puppet", reply=f"An answer {trick} [evil].")
    answered = await inside("ask", QUESTION, "-s", f"{space.url}/evil", "-m", f"{space.url}/puppet")
    found = await inside("ask", QUESTION, "-s", f"{space.url}/evil", "--retrieve")
    for ran in (answered, found):
        assert ran.code == 0
        assert "hidden" in ran.out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", ran.out)


async def test_rich_markup_in_answers_is_printed_as_text(inside: Inside, space: Space) -> None:
    space.model("painter", reply="[red]Not red[/red] [/] :smile: [docs]")
    ran = await inside("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/painter")
    assert ran.out.startswith("[red]Not red[/red] [/] :smile: [docs]")


async def test_an_answer_in_a_pipe_is_not_wrapped(cli: Cli, space: Space) -> None:
    long = "word " * 60
    space.model("writer", reply=long)
    ran = await cli("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/writer")
    assert ran.out.splitlines()[0].strip() == long.strip()


async def test_a_closed_pipe_prints_no_traceback(cli: Cli, space: Space) -> None:
    """As in `anabranch ask … | head -1`."""
    arguments = ("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/scribe")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        async with started(*arguments, home=cli.home, stdout=writer) as process:
            _, err = await process.communicate()
    finally:
        os.close(writer)
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err


async def test_ask_on_an_ascii_terminal(cli: Cli, space: Space) -> None:
    """As a pipe on Windows, where the encoding is not UTF-8."""
    ran = await cli("ask", QUESTION, "-s", f"{space.url}/docs", "-m", f"{space.url}/scribe", PYTHONIOENCODING="ascii")
    assert "Traceback" not in ran.err
    assert ran.code == 0
    assert ran.out.startswith("An anabranch is a section of a river")


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["-s", "nobody", "--retrieve"], "'nobody'", id="unknown source"),
        pytest.param(["-s", "URL/docs", "-m", "nobody"], "'nobody'", id="unknown model"),
        pytest.param(["-s", "http://[::1/x", "--retrieve"], "http://[::1/x", id="unparsable URL"),
        pytest.param(["-s", "http://127.0.0.1:99999/x", "--retrieve"], "99999", id="impossible port"),
        pytest.param(["-s", "ftp://host/x", "--retrieve"], "ftp://host/x", id="wrong scheme"),
        pytest.param(["-s", "http:///", "--retrieve"], "http:///", id="no host"),
        pytest.param(["-s", "http://host", "--retrieve"], "URL/slug", id="no slug"),
        pytest.param(["-s", "URL/docs", "-m", "http://[::1/x"], "http://[::1/x", id="unparsable model URL"),
        pytest.param(["-s", "URL/docs", "-t", "alice", "--retrieve"], "--token", id="token without owner"),
        pytest.param(["-s", "URL/docs", "-t", "a=@missing", "--retrieve"], "missing", id="token file missing"),
        pytest.param(["-s", "URL/docs", "-t", "a=@binary", "--retrieve"], "binary", id="token file not text"),
        pytest.param(["-s", "URL/docs", "--retrieve", "--config", "missing.yaml"], "missing.yaml", id="no config"),
        pytest.param(["-s", "URL/docs", "--retrieve", "--config", "broken.yaml"], "broken.yaml", id="broken config"),
    ],
)
def test_errors_are_one_sentence_on_standard_error(run: Run, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.yaml").write_text("settings: [", encoding="utf-8")
    given = [argument.replace("URL/", f"{NOBODY}/") for argument in arguments]
    ran = run("ask", QUESTION, *given, AGGREGATOR_SYFTHUB_URL=NOBODY)
    assert words in said(ran)


def test_an_unreachable_hub_exits_1(run: Run) -> None:
    ran = run("ask", QUESTION, "-s", "alice/docs", "--retrieve", AGGREGATOR_SYFTHUB_URL=NOBODY)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        "anabranch: The hub at http://127.0.0.1:1 (AGGREGATOR_SYFTHUB_URL) cannot be asked. "
        "No connection could be made.\n"
    )


async def test_an_empty_question_is_an_error(cli: Cli, space: Space) -> None:
    assert "empty" in said(await cli("ask", "  ", "-s", f"{space.url}/docs", "--retrieve"))


async def test_an_invalid_environment_variable_is_an_error(cli: Cli, space: Space) -> None:
    ran = await cli("ask", QUESTION, "-s", f"{space.url}/docs", "--retrieve", AGGREGATOR_TOTAL_TIMEOUT="soon")
    assert said(ran).startswith("AGGREGATOR_TOTAL_TIMEOUT takes a number of seconds above 0")


async def test_serve_on_a_port_in_use_is_an_error(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = await cli("serve", "--host", "127.0.0.1", "--port", str(port))
    assert f"127.0.0.1:{port}" in said(ran)
    assert "already in use" in ran.err


@pytest.mark.parametrize(
    "arguments", [["ask"], ["ask", QUESTION, "-k", "0"], ["ask", QUESTION, "--nonsense"], ["nonsense"]]
)
def test_usage_errors_exit_2_with_a_hint(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "--help" in ran.err


@pytest.mark.parametrize("arguments", [["--help"], ["ask", "--help"], ["serve", "-h"], ["--version"]])
def test_help_and_version(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.err) == (0, "")
    assert "anabranch" in ran.out


# --- Ctrl-C


@pytest.mark.parametrize(("source", "model"), [("hang", "scribe"), ("docs", "hang"), ("docs", "endless")])
async def test_ctrl_c_ends_ask_at_once(cli: Cli, space: Space, source: str, model: str) -> None:
    space.model("endless", reply="word " * 10_000, chunk_delay_s=0.01)
    arguments = ("ask", QUESTION, "-s", f"{space.url}/{source}", "-m", f"{space.url}/{model}")
    async with started(*arguments, home=cli.home, variables=STREAMING) as process:
        waits_for = source if source == "hang" else model
        await space.wait_for(lambda: any(request.slug == waits_for for request in space.requests), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(3):
            _, err = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"Traceback" not in err
    await space.wait_for(lambda: all(request.finished or request.disconnected for request in space.requests))
