"""A server that records its runs in a folder."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from anabranch import Answered, Failed
from anabranch.app.replay import replay
from anabranch.domain.recording import Recording
from anabranch.testing import Space, load_recording
from conftest import Server, ref

Serve = Callable[..., AbstractAsyncContextManager[Server]]


def kept(folder: Path) -> list[Recording]:
    return [load_recording(folder / name) for name in sorted(names(folder))]


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_the_runs_of_a_server_are_recorded_and_replay(serve: Serve, space: Space, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    token = "secret-token-of-the-owner"
    body = {
        "prompt": "Why do rivers branch?",
        "data_sources": [ref(space, "docs", owner="ada"), ref(space, "html")],
        "model": ref(space, "scribe"),
        "endpoint_tokens": {"ada": token},
    }
    async with serve(recordings_dir=str(folder)) as server:
        answer = await server.chat(**body)
        await server.stream(**body)
        await server.stream(**{**body, "model": ref(space, "status-500")})
    recordings = kept(folder)
    assert len(recordings) == 3
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all((folder / name).stat().st_mode & 0o777 == 0o600 for name in names(folder))
    assert all(token not in (folder / name).read_text() for name in names(folder))
    assert [isinstance(recording.end, Failed) for recording in recordings] == [False, False, True]
    end = recordings[0].end
    assert isinstance(end, Answered)
    assert end.answer.text == answer["response"]
    assert recordings[0].context.surface == "chat"
    for recording in recordings:
        assert (await replay(recording)).same_as(recording)


async def test_the_oldest_recordings_are_deleted(serve: Serve, space: Space, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    async with serve(recordings_dir=str(folder), recordings_keep=2) as server:
        for number in range(4):
            await server.chat(prompt=f"Question {number}?", data_sources=[ref(space, "docs")])
    assert [recording.question.text for recording in kept(folder)] == ["Question 2?", "Question 3?"]


async def test_a_reader_who_leaves_is_recorded_as_cancelled(serve: Serve, space: Space, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    body = {"prompt": "Why?", "data_sources": [ref(space, "docs")], "model": ref(space, "hang")}
    async with serve(recordings_dir=str(folder)) as server:
        async with server.session.post(f"{server.url}/api/v1/chat/stream", json=body) as response:
            async for line in response.content:
                if line.startswith(b"event: generation_start"):
                    break
        await space.wait_for(lambda: any(one.slug == "hang" and one.disconnected for one in space.requests))
    (recording,) = kept(folder)
    end = recording.end
    assert isinstance(end, Failed)
    assert end.code == "cancelled"
    assert (await replay(recording)).same_as(recording)


async def test_a_folder_that_cannot_be_written_does_not_fail_an_answer(
    serve: Serve, space: Space, tmp_path: Path
) -> None:
    async with serve(recordings_dir=str(tmp_path / "recordings")) as server:
        (tmp_path / "recordings").write_text("a file")
        answer = await server.chat(prompt="Why?", data_sources=[ref(space, "docs")], model=ref(space, "scribe"))
    assert answer["response"]


async def test_without_the_setting_nothing_is_recorded(serve: Serve, space: Space, tmp_path: Path) -> None:
    async with serve() as server:
        await server.chat(prompt="Why?", data_sources=[ref(space, "docs")], model=ref(space, "scribe"))
    assert not [name for name in names(tmp_path) if name != "data"]
