"""`.env` of the working directory: what it may contain, whose file is trusted, and that only `serve` reads it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from anabranch.configuration import env_file
from anabranch.configuration.settings import PREFIX, add_missing, load
from anabranch.domain.errors import ConfigurationError
from support.server_process import serving, started

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
STRANGER = 65_534


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / ".env"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)
    return path


def events(lines: list[dict[str, object]], event: str) -> list[dict[str, object]]:
    return [line for line in lines if line["event"] == event]


# --- the format


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("AGGREGATOR_A=b", "b"),
        ("export AGGREGATOR_A=b", "b"),
        ("  AGGREGATOR_A = b  ", "b"),
        ("AGGREGATOR_A=", ""),
        ("AGGREGATOR_A='b c'", "b c"),
        ('AGGREGATOR_A="b c"', "b c"),
        ("AGGREGATOR_A=b c # a comment", "b c"),
        ("AGGREGATOR_A=b#c", "b#c"),
        ("AGGREGATOR_A= # a comment", ""),
        ("AGGREGATOR_A=b \t # a comment # another", "b"),
        ("AGGREGATOR_A='b # c' # a comment", "b # c"),
        ("AGGREGATOR_A='b\\n$c ${d} \"e\"'", 'b\\n$c ${d} "e"'),
        ('AGGREGATOR_A="b\\n\\"c\\" \\\\ \\x \\${d}"', 'b\n"c" \\ \\x ${d}'),
        ("AGGREGATOR_A=$b", "$b"),
        ('AGGREGATOR_A=["b", "c"]', '["b", "c"]'),
        ("AGGREGATOR_A=b=c", "b=c"),
        ("AGGREGATOR_A=don't", "don't"),
        ("AGGREGATOR_A=b\r", "b"),
    ],
)
def test_a_line_of_the_env_file(tmp_path: Path, line: str, value: str) -> None:
    written(tmp_path, f"# a comment\n\n{line}\n")
    found = env_file.read(tmp_path)
    assert (found.values, found.lines, found.ignored) == ({"AGGREGATOR_A": value}, {"AGGREGATOR_A": 3}, "")


@pytest.mark.parametrize(
    "line", ["AGGREGATOR_A=a{}b", "AGGREGATOR_A='a'{}#b", "AGGREGATOR_A=a{}#b", "{}AGGREGATOR_A=a{}"]
)
def test_a_line_with_many_spaces_is_read_at_once(tmp_path: Path, line: str) -> None:
    written(tmp_path, line.format(" " * 30_000, " " * 30_000))
    begin = time.process_time()
    assert env_file.read(tmp_path).values["AGGREGATOR_A"].startswith("a")
    assert time.process_time() - begin < 1


def test_lines_of_other_programs_are_ignored_whatever_they_contain(tmp_path: Path) -> None:
    key = 'PRIVATE_KEY="-----BEGIN KEY-----\nAbC=\n-----END KEY-----"'
    others = f"PORT=9\nexport -p\nset -a; if [ 1 ]\n'quoted'=1\n{key}\nAPP='open\nAGGREGATED=1\naggregator_a=2\n"
    written(tmp_path, f"\ufeffAGGREGATOR_A=1\r\n{others}AGGREGATOR_B=2")
    found = env_file.read(tmp_path)
    assert found.values == {"AGGREGATOR_A": "1", "AGGREGATOR_B": "2"}
    assert found.lines["AGGREGATOR_B"] == 12


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("AGGREGATOR_A", "line 1: AGGREGATOR_A has no value; write AGGREGATOR_A=value."),
        ("\nAGGREGATOR_A='s3cret", "line 2: AGGREGATOR_A: the quote is not closed on this line."),
        ('AGGREGATOR_A="s3cret\nB="', "line 1: AGGREGATOR_A: the quote is not closed on this line."),
        ("AGGREGATOR_A='s3' cret", "line 1: AGGREGATOR_A: there is text after the closing quote."),
        ("AGGREGATOR_s3-cret=1", "line 1: the name of a variable has only letters, digits and _."),
        ("AGGREGATOR_A=${s3cret}", "line 1: AGGREGATOR_A: ${…} is not expanded here; write the value, or"),
        ('AGGREGATOR_A="${s3cret}"', "line 1: AGGREGATOR_A: ${…} is not expanded here; write the value, or"),
        ("AGGREGATOR_A=s3cret\n\nAGGREGATOR_A=s3cret", ": AGGREGATOR_A is there twice (lines 1 and 3)."),
        ("X='s3cret\nAGGREGATOR_A=1\nY='", "line 1: the quote that begins here is not closed on this line."),
        (b"A=1\nAGGREGATOR_A=s3cret\xff", "line 2: this is not UTF-8; save the file as UTF-8."),
        ("AGGREGATOR_A=s3cret".encode("utf-16"), "line 1: this is not UTF-8; save the file as UTF-8."),
        ("AGGREGATOR_A=s3cret".encode("utf-16-le"), ": this is not UTF-8; save the file as UTF-8."),
        ("AGGREGATOR_A=s3cret\n" + "#" * 70_000, ": the file is larger than 65,536 bytes."),
    ],
)
def test_an_error_in_the_env_file_names_the_line_and_never_the_value(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigurationError) as caught:
        env_file.read(tmp_path)
    assert caught.value.message.startswith(str(path))
    assert said in caught.value.message
    assert "s3" not in caught.value.message


# --- whose file it is


def test_the_documented_env_file_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    example = page.partition("\n## .env\n")[2].split("```")[1]
    written(tmp_path, example)
    settings = load(env_file.read(tmp_path).values)
    assert (settings.port, settings.model_api_key) == (8005, "a # b $c")


def test_without_an_env_file_nothing_changes(tmp_path: Path) -> None:
    assert env_file.read(tmp_path) == env_file.EnvFile(tmp_path / ".env")


@pytest.mark.parametrize(("mode", "trusted"), [(0o600, True), (0o644, True), (0o664, True), (0o666, False)])
def test_an_env_file_that_others_may_write_is_ignored(tmp_path: Path, mode: int, trusted: bool) -> None:
    written(tmp_path, "AGGREGATOR_A=1").chmod(mode)
    found = env_file.read(tmp_path)
    assert found.values == ({"AGGREGATOR_A": "1"} if trusted else {})
    assert found.ignored == ("" if trusted else "other users may write to it; if it is yours: chmod go-w")


@AS_ROOT
@pytest.mark.parametrize(("mode", "trusted"), [(0o644, True), (0o664, False)])
def test_an_env_file_that_another_group_may_write_is_ignored(tmp_path: Path, mode: int, trusted: bool) -> None:
    path = written(tmp_path, "AGGREGATOR_A=1")
    os.chown(path, -1, STRANGER)
    path.chmod(mode)
    assert bool(env_file.read(tmp_path).values) is trusted


def test_a_link_within_the_folder_is_followed_and_others_are_ignored(tmp_path: Path) -> None:
    """Kubernetes mounts files as links to a folder beside them."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for place in (outside, folder / "..data"):
        place.mkdir(parents=True)
        written(place, "AGGREGATOR_A=1")
    link = folder / ".env"
    link.symlink_to("..data/.env")
    assert env_file.read(folder).values == {"AGGREGATOR_A": "1"}
    for target, reason in {
        outside / ".env": "it is a link to a file outside this folder",
        folder / "missing": "it is a link to a file that does not exist",
        link: "it cannot be read (",
    }.items():
        link.unlink()
        link.symlink_to(target)
        found = env_file.read(folder)
        assert not found.values
        assert found.ignored.startswith(reason)


def test_a_fifo_or_a_folder_of_that_name_is_ignored_at_once(tmp_path: Path) -> None:
    """`python -m venv .env` is common."""
    path = tmp_path / ".env"
    path.mkdir()
    assert env_file.read(tmp_path).ignored == "it is not a regular file"
    path.rmdir()
    os.mkfifo(path)
    assert env_file.read(tmp_path).ignored == "it is not a regular file"


# --- what counts more


def test_a_variable_of_the_environment_counts_more_unless_it_is_empty() -> None:
    environment = {"AGGREGATOR_PORT": "1", "AGGREGATOR_HOST": "", "AGGREGATOR_ENDPOINT_ALLOWLIST": ""}
    values = dict.fromkeys([*environment, "AGGREGATOR_DEBUG"], "9")
    assert add_missing(values, environment) == ["AGGREGATOR_HOST", "AGGREGATOR_DEBUG"]
    assert environment == {
        "AGGREGATOR_PORT": "1",
        "AGGREGATOR_HOST": "9",
        "AGGREGATOR_ENDPOINT_ALLOWLIST": "",
        "AGGREGATOR_DEBUG": "9",
    }


async def test_serve_reads_the_env_file_below_the_environment_and_above_the_configuration_file(tmp_path: Path) -> None:
    """With two workers, which read their settings from the environment."""
    written(
        tmp_path,
        "AGGREGATOR_MAX_TOP_K=7\nAGGREGATOR_DEFAULT_TOP_K=3\nAGGREGATOR_WORKERS=9\nAGGREGATOR_PROT=1\nHOST=nowhere\n"
        "export AI_ENABLE_AGGREGATOR_STREAMING=false\n",
    )
    (tmp_path / "anabranch.yaml").write_text("settings: {max_top_k: 6, debug: true}", encoding="utf-8")
    variables = {"AGGREGATOR_DEFAULT_TOP_K": "2"}
    async with (
        serving(home=tmp_path, workers=2, variables=variables) as program,
        aiohttp.ClientSession(program.url) as session,
    ):
        [read] = events(program.log, "env_file_read")
        assert read["file"] == str(tmp_path / ".env")
        assert read["variables"] == ["AGGREGATOR_MAX_TOP_K", "AGGREGATOR_PROT"]
        assert [line["variable"] for line in events(program.log, "unknown_setting")] == ["AGGREGATOR_PROT"]
        [ignored] = events(program.log, "env_variable_ignored")
        assert (ignored["level"], ignored["variable"]) == ("warning", "AI_ENABLE_AGGREGATOR_STREAMING")
        assert "set it in the environment" in str(ignored["reason"])
        for _ in range(6):  # until both workers have answered
            async with session.get("/openapi.json", headers={"Connection": "close"}) as response:
                schemas = (await response.json())["components"]["schemas"]
            assert '"maximum": 7' in json.dumps(schemas["ChatRequest"]["properties"]["top_k"])
        async with session.get("/docs") as response:
            assert response.status == 200


@AS_ROOT
async def test_serve_ignores_an_env_file_of_another_user_and_says_so(tmp_path: Path) -> None:
    os.chown(written(tmp_path, "AGGREGATOR_DEBUG=s3cret"), STRANGER, -1)
    async with serving(home=tmp_path) as program:
        [ignored] = events(program.log, "env_file_ignored")
    assert (ignored["level"], ignored["file"]) == ("warning", str(tmp_path / ".env"))
    assert ignored["reason"] == "it belongs to another user; if it is yours: chown"
    assert "s3cret" not in program.text


async def test_a_wrong_value_in_the_env_file_is_found_by_its_line(tmp_path: Path) -> None:
    written(tmp_path, "# ours\nAGGREGATOR_TOTAL_TIMEOUT=soon\n")
    async with started(home=tmp_path) as program:
        assert await program.ended() == 2
    said = "AGGREGATOR_TOTAL_TIMEOUT takes a number of seconds above 0, at most 86,400, not 'soon'."
    assert program.lines == [f"anabranch: {said} (.env, line 2: AGGREGATOR_TOTAL_TIMEOUT)"]


def test_other_commands_do_not_read_the_env_file(tmp_path: Path) -> None:
    written(tmp_path, "AGGREGATOR_TOTAL_TIMEOUT=soon\nAGGREGATOR_PROT=1\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    command = [sys.executable, "-m", "anabranch", "collections", "list"]
    environment = {**inherited, "AGGREGATOR_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "AGGREGATOR_" not in done.stderr
