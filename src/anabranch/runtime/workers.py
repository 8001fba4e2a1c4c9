"""What all workers have counted, added up by whichever of them is asked."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import Metric, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead


class AllWorkers(MultiProcessCollector):
    """The sum over the files in which the workers count. What a worker that is gone has counted stays; how it stood
    (a gauge) goes with it."""

    def collect(self) -> Iterable[Metric]:
        folder = Path(self._path)
        for pid in {int(path.stem.rpartition("_")[2]) for path in folder.glob("gauge_live*.db")}:
            if not _runs(pid):
                with suppress(FileNotFoundError):  # another worker was quicker
                    mark_process_dead(pid, self._path)  # type: ignore[no-untyped-call]
        files = [str(path) for path in folder.glob("*.db") if _has_begun(path)]
        merged: Iterable[Metric] = self.merge(files)  # type: ignore[no-untyped-call]
        return merged


def is_shared() -> bool:
    """Whether the workers' counts are kept in files: `serve` sees to it where there are several."""
    return bool(values.ValueClass._multiprocess)


def _has_begun(path: Path) -> bool:
    """Not one that a worker is just about to write, nor one that was just taken away."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _runs(pid: int) -> bool:
    if sys.platform == "win32":  # there, asking in this way ends a process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
