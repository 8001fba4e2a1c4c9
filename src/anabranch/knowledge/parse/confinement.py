"""What a parser process gives up before it reads a document: network, files, other processes, privileges. What the
kernel does not permit is reported, and the rest applies all the same."""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

APPLIED = "applied"

# prctl(2), unshare(2), seccomp(2)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
SIGKILL = 9
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWIPC = 0x08000000
CAPABILITY_VERSION_3 = 0x20080522

# Users that no account has: systemd's range for services without one. Each parser takes another.
FIRST_UID = 61_184
UIDS = 4_000

# Classic BPF, and what seccomp(2) does with a call.
LOAD = 0x20
JUMP_EQUAL = 0x15
RETURN = 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050001  # EPERM
KILL = 0x80000000
NUMBER_AT = 0
ARCHITECTURE_AT = 4
FIRST_ARGUMENT_AT = 16

# All that parsing needs: memory, time, signals to itself, and the pipes that are open. It opens nothing.
CALLS = (
    "read write readv writev close fstat lseek fcntl ioctl poll ppoll pselect6 "
    "mmap munmap mremap mprotect madvise brk futex get_robust_list set_robust_list rseq membarrier "
    "rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall setitimer getitimer "
    "clock_gettime clock_getres clock_nanosleep gettimeofday nanosleep getrandom "
    "getpid gettid getuid geteuid getgid getegid getrusage sched_yield sched_getaffinity exit exit_group"
)
# Signals with which a process ends itself.
OWN_CALLS = ("tgkill",)


class Architecture:
    """The numbers of system calls; `audit` is what seccomp calls the architecture."""

    def __init__(self, audit: int, numbers: str) -> None:
        self.audit = audit
        pairs = (pair.split(":") for pair in numbers.split())
        self.numbers = {name: int(number) for name, number in pairs}


LANDLOCK_CREATE_RULESET = 444
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_VERSION = 1
# How many rights on files, on TCP ports, and how many scopes a version of Landlock knows.
LANDLOCK_RIGHTS = ((1, 13, 0, 0), (2, 14, 0, 0), (3, 15, 0, 0), (4, 15, 2, 0), (5, 16, 2, 0), (6, 16, 2, 2))

ARCHITECTURES: Mapping[str, Architecture] = {
    "x86_64": Architecture(
        0xC000003E,
        "read:0 write:1 close:3 fstat:5 poll:7 lseek:8 mmap:9 mprotect:10 munmap:11 brk:12 rt_sigaction:13 "
        "rt_sigprocmask:14 rt_sigreturn:15 ioctl:16 readv:19 writev:20 sched_yield:24 mremap:25 madvise:28 "
        "nanosleep:35 getitimer:36 setitimer:38 getpid:39 exit:60 fcntl:72 gettimeofday:96 getrusage:98 getuid:102 "
        "getgid:104 geteuid:107 getegid:108 capset:126 sigaltstack:131 gettid:186 futex:202 sched_getaffinity:204 "
        "restart_syscall:219 clock_gettime:228 clock_getres:229 clock_nanosleep:230 exit_group:231 tgkill:234 "
        "pselect6:270 ppoll:271 set_robust_list:273 get_robust_list:274 getrandom:318 membarrier:324 rseq:334",
    ),
    "aarch64": Architecture(
        0xC00000B7,
        "fcntl:25 ioctl:29 close:57 lseek:62 read:63 write:64 readv:65 writev:66 pselect6:72 ppoll:73 fstat:80 "
        "capset:91 exit:93 exit_group:94 futex:98 set_robust_list:99 get_robust_list:100 nanosleep:101 getitimer:102 "
        "setitimer:103 clock_gettime:113 clock_getres:114 clock_nanosleep:115 sched_getaffinity:123 sched_yield:124 "
        "restart_syscall:128 tgkill:131 sigaltstack:132 rt_sigaction:134 rt_sigprocmask:135 rt_sigreturn:139 "
        "getrusage:165 gettimeofday:169 getpid:172 getuid:174 geteuid:175 getgid:176 getegid:177 gettid:178 brk:214 "
        "munmap:215 mremap:216 mmap:222 mprotect:226 madvise:233 getrandom:278 membarrier:283 rseq:293",
    ),
}
# What parsers load while they read, apart from `encodings`. Afterwards no file can be opened.
PRELOADED = (
    *("_strptime", "bz2", "charset_normalizer", "lxml.etree", "lzma", "markdown_it", "pypdfium2", "selectolax.lexbor"),
    *("unicodedata", "zlib"),
)


def preload() -> None:
    """Load everything that a document can make its parser load."""
    import encodings  # noqa: PLC0415

    for name in (*PRELOADED, *(f"encodings.{found.name}" for found in iter_modules(encodings.__path__))):
        try:
            import_module(name)
        except ImportError:  # codecs of Windows, modules that this Python was built without
            continue


def confine() -> dict[str, str]:
    """Give up what a parser does not need; returns what each restriction came to: `applied`, or why it was not."""
    if sys.platform != "linux":
        return dict.fromkeys(STEPS, f"{platform.system()} has no such restriction")
    return {name: _outcome(step) for name, step in STEPS.items()}


def _outcome(step: Callable[[], None]) -> str:
    try:
        step()
    except OSError as error:
        return f"the kernel refuses it ({error.strerror})" if error.errno else str(error.strerror)
    return APPLIED


def _separate_network() -> None:
    """A network namespace without interfaces; whoever is not root needs a user namespace for it."""
    _unshare(CLONE_NEWNET | CLONE_NEWIPC | (0 if os.geteuid() == 0 else CLONE_NEWUSER))


def _own_user() -> None:
    """A user of its own, who owns no file and no other process."""
    if os.getuid() != 0 or _is_mapped():
        raise OSError(0, "only a server that runs as root can change the user")
    number = FIRST_UID + os.getpid() % UIDS
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def _is_mapped() -> bool:
    """Whether root here is root of a user namespace in which there is no other user."""
    return int(Path("/proc/self/uid_map").read_text(encoding="ascii").split()[2]) < FIRST_UID + UIDS


def _no_capabilities() -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _call(_architecture().numbers["capset"], header, bytes(24))


def _no_new_privileges() -> None:
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _private_memory() -> None:
    """No other process of this user may read its memory. The kernel forgets the signal when the user changes."""
    _prctl(PR_SET_DUMPABLE, 0)
    _prctl(PR_SET_PDEATHSIG, SIGKILL)


def _no_files() -> None:
    """Landlock, without a rule that permits anything."""
    version = _call(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    _, files, ports, scopes = next(one for one in reversed(LANDLOCK_RIGHTS) if one[0] <= version)
    masks = ((1 << count) - 1 for count in (files, ports, scopes))
    # The kernel refuses fields that it does not know, unless they are empty.
    rules = struct.pack("QQQ", *masks)
    ruleset = _call(LANDLOCK_CREATE_RULESET, rules, len(rules), 0)
    try:
        _call(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _few_system_calls() -> None:
    """A seccomp filter: every call is refused but those that are listed."""
    machine = _architecture()
    _install(
        [
            (LOAD, 0, 0, ARCHITECTURE_AT),
            (JUMP_EQUAL, 1, 0, machine.audit),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, NUMBER_AT),
            *(
                instruction
                for name in CALLS.split()
                if name in machine.numbers
                for instruction in ((JUMP_EQUAL, 0, 1, machine.numbers[name]), (RETURN, 0, 0, ALLOW))
            ),
            *(instruction for name in OWN_CALLS for instruction in _to_itself(machine.numbers[name])),
            (RETURN, 0, 0, REFUSE),
        ]
    )


Instruction = tuple[int, int, int, int]


def _to_itself(number: int) -> Sequence[Instruction]:
    """Allow a call if its first argument is this process."""
    return (
        (JUMP_EQUAL, 0, 4, number),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (JUMP_EQUAL, 0, 1, os.getpid()),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    )


def _install(program: Sequence[Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))


# In this order: a namespace needs privileges, and the filter refuses the calls of all others.
STEPS: Mapping[str, Callable[[], None]] = {
    "network namespace": _separate_network,
    "own user": _own_user,
    "no capabilities": _no_capabilities,
    "no new privileges": _no_new_privileges,
    "private memory": _private_memory,
    "no files (Landlock)": _no_files,
    "few system calls (seccomp)": _few_system_calls,
}


def _architecture() -> Architecture:
    machine = ARCHITECTURES.get(platform.machine())
    if machine is None or sys.maxsize < 1 << 32:
        raise OSError(0, f"system calls of {platform.machine()} are not known")
    return machine


def _unshare(flags: int) -> None:
    _checked(_libc().unshare(flags))


def _prctl(option: int, value: int, pointer: bytes | None = None) -> None:
    _checked(_libc().prctl(option, ctypes.c_ulong(value), pointer, None, None))


def _call(number: int, *arguments: int | bytes | None) -> int:
    found = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(_libc().syscall(ctypes.c_long(number), *found))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
