"""The leash on a child, a small program of its own: `leash.py <socket> <command> [argument ...]` runs the command and,
once that has ended or whoever holds the socket's other end has, ends all that the command has started."""

import ctypes
import os
import select
import signal
import sys
import time

GRACE_S = 1.0  # from the end of its input until a child is asked to go
ASKED_S = 0.5  # from then until it is made to
LAST_S = 1.0  # for the kernel to clear away what was killed
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEATH_SIGNAL, SUBREAPER = 1, 36
NEVER = float("inf")
LINUX = sys.platform == "linux"


def main(held: int, command: list[str]) -> int:
    """Python's own signals wake the loop by a byte each; what a child leaves behind when it ends comes to us, as we are
    its reaper."""
    _let_go(held)
    prctl = ctypes.CDLL(None).prctl if LINUX else lambda *_: 0
    prctl(SUBREAPER, 1, 0, 0, 0)
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    for number in (*ASKS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    child, trouble = _started(command, prctl)
    try:
        os.write(held, f"{trouble} {child}".encode())
    except OSError:
        trouble = trouble or 1
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    status = None if trouble else _watched(child, held, wakes)
    return _cleared(child, status)


def _let_go(held: int) -> None:
    """Not every event loop closes for a child what it should not have."""
    os.set_inheritable(held, False)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  pathlib is slow to load
        if int(name) > 2 and int(name) != held:
            try:
                os.close(int(name))
            except OSError:
                continue  # that of the listing itself


def _started(command: list[str], prctl) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """The child, and 0 or the number of the error for which it could not be run."""
    leash = os.getpid()
    said, says = os.pipe()
    child = os.fork()
    if child:
        os.close(says)
        return child, int(os.read(said, 20) or 0)
    try:
        os.setsid()
        prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if os.getppid() == leash:
            os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(says, str(error.errno).encode())
    finally:
        os._exit(127)


def _watched(child: int, held: int, wakes: int) -> int | None:
    """How the child ended; None if it has not, although it was asked."""
    ask_at = end_at = NEVER
    polled = select.poll()
    polled.register(held, select.POLLIN)
    polled.register(wakes, select.POLLIN)
    while (status := _buried(child)[0]) is None and (now := time.monotonic()) < end_at:
        if ask_at <= now:
            _signal_group(child, signal.SIGTERM)
            ask_at, end_at = NEVER, min(end_at, now + ASKED_S)
        until = min(ask_at, end_at)
        ready = polled.poll(None if until == NEVER else max(0.0, until - now) * 1000 + 1)
        for one, _ in ready:
            if one == held:
                polled.unregister(held)
                ask_at = min(ask_at, time.monotonic() + GRACE_S)
            elif set(os.read(wakes, 4096)) & set(ASKS):
                ask_at = time.monotonic()
    return status


def _cleared(child: int, status: int | None) -> int:
    """Ends all that is left, until there is nobody."""
    until = time.monotonic() + LAST_S
    _signal_group(child, signal.SIGKILL)
    while time.monotonic() < until:
        for left in _descendants():
            try:
                os.kill(left, signal.SIGKILL)
            except OSError:
                continue  # it has gone, or is not ours to end
        ended, alone = _buried(child)
        status = ended if status is None else status
        if alone:
            break
        time.sleep(0.002)
    return 1 if status is None else status if status >= 0 else 128 - status


def _buried(child: int) -> tuple[int | None, bool]:
    """Buries whoever has died: how the child ended, if it was among them, and whether nobody is left."""
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
        return  # nobody is left in it


def _descendants() -> list[int]:
    """Whoever descends from us, those with a session of their own too. Other systems than Linux do not say."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if LINUX else ():  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found = [os.getpid()]
    for one in found:
        found.extend(children.get(one, ()))
    return found[1:]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
