"""The folder with recordings of a server's runs: the last ones, for the operator."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Telemetry
from anabranch.domain.errors import RecordingError
from anabranch.domain.model import Value
from anabranch.domain.signals import RecordingFailed

if TYPE_CHECKING:
    from anabranch.app.recording import RunRecorder

PREFIX, SUFFIX = "run-", ".json"
UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
MAX_NAME = 100
UNFINISHED_S = 3_600
UUID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class StartedRecording(NamedTuple):
    """A recorder, and what a Run needs so that it is recorded."""

    recorder: "RunRecorder"
    answerer: Answerer
    telemetry: Telemetry


class RecordingFolder:
    """Records Runs into files, and deletes the oldest when there are more than `keep`. `erased` tells whether one of
    these documents, or a user, was erased after a time."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        recorded: "Callable[[RunRecorder], Answerer]",
        telemetry: Telemetry,
        erased: Callable[[Collection[str], float], Awaitable[bool]],
    ) -> None:
        self._erased = erased
        self._settings = settings
        self._folder = folder.expanduser()
        self._recorded = recorded
        self._telemetry = telemetry
        self._writing: set[asyncio.Task[None]] = set()

    def begin(self) -> StartedRecording:
        from anabranch.app.recording import RunRecorder  # noqa: PLC0415  most servers do not record

        recorder = RunRecorder(self._settings)
        return StartedRecording(recorder, self._recorded(recorder), recorder.telemetry(self._telemetry))

    def keep(self, recorder: "RunRecorder") -> None:
        """Write the recording of a Run that has ended, without making anyone wait."""
        task = asyncio.create_task(self._write(recorder))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def settled(self) -> None:
        """Wait until all recordings are written."""
        while self._writing:
            await asyncio.wait(self._writing)

    async def _write(self, recorder: "RunRecorder") -> None:
        name = UNSAFE.sub("-", recorder.name)[:MAX_NAME]
        try:
            await asyncio.to_thread(self._folder.mkdir, mode=0o700, parents=True, exist_ok=True)
            await recorder.save(path := self._folder / f"{PREFIX}{name}{SUFFIX}")
            # An erasure that begins from now on finds the file.
            documents = {one.decode() for one in await asyncio.to_thread(ids_in, path)}
            if await self._erased(documents, recorder.began_at):
                await asyncio.to_thread(path.unlink, missing_ok=True)
            await asyncio.to_thread(self._delete_oldest)
        except RecordingError as error:
            self._telemetry.noted(RecordingFailed(reason=error.message))
        except OSError as error:
            self._telemetry.noted(RecordingFailed(reason=f"{self._folder}: {error.strerror or error}."))
        except Exception as error:  # noqa: BLE001  task boundary: nobody awaits it
            self._telemetry.noted(RecordingFailed(reason=f"Writing {name} failed on our side: {error!r}."))

    def _delete_oldest(self) -> None:
        """Also files that a killed server has left unfinished."""
        for path in self._folder.glob(f".{PREFIX}*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > UNFINISHED_S:
                    path.unlink()
        # A name begins with the time, so the names sort by age.
        files = sorted(self._folder.glob(f"{PREFIX}*{SUFFIX}"))
        for path in files[: -self._settings.recordings_keep]:
            path.unlink(missing_ok=True)


class RecordedTurns(Value):
    """The earlier turns of a recorded question."""

    history: tuple[msgspec.Raw, ...] = ()


class RecordedQuestion(Value):
    question: RecordedTurns


def repeats_turns(recording: Path) -> bool:
    """Whether a recording may have text of earlier turns; also one that cannot be read."""
    try:
        return bool(msgspec.json.decode(recording.read_bytes(), type=RecordedQuestion).question.history)
    except msgspec.MsgspecError:
        return True


def ids_in(recording: Path) -> set[bytes]:
    """What a recording has that may be the id of a document."""
    with suppress(FileNotFoundError):  # deleted meanwhile
        return set(UUID.findall(recording.read_bytes()))
    return set()
