"""A small program that runs an MCP server: `process_guard.py <socket> <command> [argument ...]`. When the command has
ended, or the process at the socket's other end has, it ends every process that the command started."""

import ctypes
import os
import select
import signal
import sys
import time

GRACE_S = 1.0  # from the end of its input until SIGTERM
TERM_S = 0.5  # from SIGTERM until SIGKILL
KILL_S = 1.0  # for the kernel to remove killed processes
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEATH_SIGNAL, SUBREAPER = 1, 36
NEVER = float("inf")
LINUX = sys.platform == "linux"


def main(socket_fd: int, command: list[str]) -> int:
    """Signals wake the loop through a pipe. Orphaned descendants become children of this process, their subreaper."""
    _close_inherited(socket_fd)
    prctl = ctypes.CDLL(None).prctl if LINUX else lambda *_: 0
    prctl(SUBREAPER, 1, 0, 0, 0)
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    child, error = _start(command, prctl)
    try:
        os.write(socket_fd, f"{error} {child}".encode())
    except OSError:
        error = error or 1
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    return _kill_all(child, None if error else _watch(child, socket_fd, wakeup_reader))


def _close_inherited(socket_fd: int) -> None:
    """Some event loops leave descriptors open in a child."""
    os.set_inheritable(socket_fd, False)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  pathlib is slow to load
        if int(name) > 2 and int(name) != socket_fd:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of the listing itself


def _start(command: list[str], prctl) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """The child's process id, and 0 or the errno of its start."""
    guard = os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, int(os.read(reader, 20) or 0)
    try:
        os.setsid()
        prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if os.getppid() == guard:
            os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(writer, str(error.errno).encode())
    finally:
        os._exit(127)


def _watch(child: int, socket_fd: int, wakeup_reader: int) -> int | None:
    """The child's exit status; None if it ignored SIGTERM."""
    term_at = kill_at = NEVER
    polled = select.poll()
    polled.register(socket_fd, select.POLLIN)
    polled.register(wakeup_reader, select.POLLIN)
    while (status := _reap(child)[0]) is None and (now := time.monotonic()) < kill_at:
        if term_at <= now:
            _signal_group(child, signal.SIGTERM)
            term_at, kill_at = NEVER, min(kill_at, now + TERM_S)
        until = min(term_at, kill_at)
        for one, _ in polled.poll(None if until == NEVER else max(0.0, until - now) * 1000 + 1):
            if one == socket_fd:
                polled.unregister(socket_fd)
                term_at = min(term_at, time.monotonic() + GRACE_S)
            elif set(os.read(wakeup_reader, 4096)) & set(STOP_SIGNALS):
                term_at = time.monotonic()
    return status


def _kill_all(child: int, status: int | None) -> int:
    """Kills all remaining processes."""
    until = time.monotonic() + KILL_S
    _signal_group(child, signal.SIGKILL)
    while time.monotonic() < until:
        for process in _descendants():
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                continue  # it has ended, or belongs to another user
        ended, is_last = _reap(child)
        status = ended if status is None else status
        if is_last:
            break
        time.sleep(0.002)
    return 1 if status is None else status if status >= 0 else 128 - status


def _reap(child: int) -> tuple[int | None, bool]:
    """Reaps ended processes. Returns the child's exit status, if it ended, and whether no child is left."""
    status = None
    try:
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            if dead[0] == child:
                status = os.waitstatus_to_exitcode(dead[1])
    except ChildProcessError:
        return status, True
    return status, False


def _signal_group(child: int, number: signal.Signals) -> None:
    try:
        os.killpg(child, number)
    except OSError:
        return  # the group is empty


def _descendants() -> list[int]:
    """All descendants, including those in other sessions. Only Linux lists them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if LINUX else ():  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
        except OSError:
            continue
    found = [os.getpid()]
    for one in found:
        found.extend(children.get(one, ()))
    return found[1:]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
