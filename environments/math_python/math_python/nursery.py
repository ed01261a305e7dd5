"""The parent of all Python sessions: a small process that forks one for each rollout that asks.

Run as a file, in an interpreter of its own: `python -I nursery.py FD SETTINGS`. It imports the packages
that sessions may use once, and hands every session a copy by forking, which takes a few milliseconds
instead of a second.

1. It reads requests from the socket FD: one datagram, with the session's end of a socket as ancillary data;
   it answers with a pidfd of the session. When FD ends, or the parent dies, it dies, and all sessions with
   it.
2. A session runs code until its socket ends: frames of a 4-byte length and JSON, {"code": ...} in,
   {"output": ..., "error": bool} out. Names stay from call to call. The last expression's value is shown,
   as in a notebook.
3. Every session has limits that the kernel keeps: memory, CPU time, size of a file, open files, and its
   output is cut where it is written. What it prints past Python goes to /dev/null.
4. Where the kernel allows namespaces, a session has no network, sees its own processes alone (so that all
   of them end with it), and can write in its own /tmp only, which is gone with it. Of the machine's files it
   sees programs, the interpreter and its packages, and nothing else: no home, no data, and not this package,
   from which answers could be read. The first answer says whether. It keeps accidents in, and a model that
   looks for answers; it is no wall against an attacker who knows the kernel.
"""

from __future__ import annotations

import array
import ast
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import itertools
import json
import linecache
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
CAPABILITY_VERSION_3 = 0x20080522
FILE_BYTES, OPEN_FILES, TMP_BYTES = 1 << 20, 64, 16 << 20
MAX_REQUEST_BYTES = 64  # a request is one byte and a socket
SOURCE = "<python>"
# What there is besides the interpreter and the packages: programs, and how they find their libraries.
SHOWN = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _leave_the_machine() -> None:
    """A user namespace without a network; what is mounted in it concerns nobody else."""
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID)
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def _own_root(packages: list[str]) -> None:
    """A file system of what is shown, and read-only."""
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    installed = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    named = [path for name in packages for path in getattr(sys.modules[name], "__path__", ())]
    shown = {path: os.path.realpath(path) for path in (*SHOWN, *prefixes, *installed, *named)}
    own = os.path.dirname(os.path.realpath(__file__))
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, b"mode=755")
    os.mkdir("/tmp/machine")
    _call("pivot_root", b"/tmp", b"/tmp/machine")
    os.chdir("/")
    for real in sorted(set(shown.values())):
        _show(real)
    for path, real in shown.items():
        if path != real and os.path.exists(real) and not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(real, path)
    if os.path.isdir(own):
        _call("mount", b"tmpfs", own.encode(), b"tmpfs", 0, b"mode=555")
    os.mkdir("/proc")
    _see_own_processes()
    _call("umount2", b"/machine", MNT_DETACH)
    os.rmdir("/machine")
    os.makedirs("/tmp", exist_ok=True)
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only))


def _show(path: str) -> None:
    """What the machine has at the path, unless it is there with a folder above it."""
    there = f"/machine{path}"
    if not os.path.exists(there) or os.path.exists(path):
        return
    if os.path.isdir(there):
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT, 0o600))
    _call("mount", there.encode(), path.encode(), None, MS_BIND | MS_REC, None)


def _see_own_processes() -> None:
    """A /proc of this process's own; none where the machine's is not whole, as in some containers."""
    with contextlib.suppress(OSError):
        _call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def _own_folder_and_no_rights() -> None:
    """In a session: a /proc and a /tmp of its own, and none of the rights that made them."""
    _call("unshare", CLONE_NEWNS)
    _see_own_processes()
    os.chdir("/tmp")  # the interpreter may lie there: what is shown of that stays
    shown = os.listdir(".")
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, f"size={TMP_BYTES}".encode())
    for name in shown:
        if os.path.islink(name):
            os.symlink(os.readlink(name), f"/tmp/{name}")
        else:
            os.mkdir(f"/tmp/{name}")
            _call("mount", name.encode(), f"/tmp/{name}".encode(), None, MS_BIND | MS_REC, None)
    _call("capset", struct.pack("II", CAPABILITY_VERSION_3, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0))


class Nursery:
    """Forks sessions."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Import what sessions use, then leave the machine where that is allowed."""
        self._settings = settings
        for package in settings["packages"]:
            importlib.import_module(package)
        self.isolated = False
        self.isolated = settings["isolate"] and self._trial()
        if self.isolated:
            self._move_out()
        gc.collect()
        gc.freeze()

    def _move_out(self) -> None:
        """Leave the machine, and go on as the first process of the new place; this one waits for its end."""
        _leave_the_machine()
        pid = os.fork()
        if pid:
            os.closerange(3, OPEN_FILES)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        _own_root(self._settings["packages"])

    def _trial(self) -> bool:
        """Whether a session can have what it should, tried by a process that is thrown away."""
        pid = os.fork()
        if pid == 0:
            try:
                self._move_out()
                self.isolated = True
                session = self._fork()
                if session == 0:
                    _own_folder_and_no_rights()
                    os._exit(0)
                failed = os.waitpid(session, 0)[1]
            except OSError:
                failed = 1
            os._exit(1 if failed else 0)
        return os.waitpid(pid, 0)[1] == 0

    def _fork(self) -> int:
        if not self.isolated:
            return os.fork()
        # Children of this process get process numbers of their own; this process keeps its.
        _call("unshare", CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                _call("setns", self._own_pids, CLONE_NEWPID)
        return pid

    def serve(self, control: socket.socket) -> None:
        """Fork for each request until the socket ends."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        control.send(json.dumps({"isolated": self.isolated}).encode())
        while True:
            asked, handles, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
            if not asked:
                return
            (handle,) = handles
            nursery = os.getpid()
            pid = self._fork()
            if pid == 0:
                with socket.socket(fileno=handle) as line:
                    control.close()
                    self._become_a_session(line, nursery)
                os._exit(0)
            os.close(handle)
            pidfd = os.pidfd_open(pid)
            control.sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))])
            os.close(pidfd)

    def _become_a_session(self, line: socket.socket, nursery: int) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not self.isolated and os.getppid() != nursery:
            os._exit(1)
        os.setsid()
        _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self.isolated:
            _own_folder_and_no_rights()
        os.chdir("/tmp")
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        limits = {
            resource.RLIMIT_AS: self._settings["memory_bytes"],
            resource.RLIMIT_CPU: self._settings["cpu_seconds"],
            resource.RLIMIT_FSIZE: FILE_BYTES,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0,
        }
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        Session(line, self._settings["output_chars"]).run()


class Session:
    """Runs code in one namespace."""

    def __init__(self, line: socket.socket, output_chars: int) -> None:
        self._line = line
        self._output_chars = output_chars
        self._names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}

    def run(self) -> None:
        """Answer until the line ends."""
        own = os.getpid()
        with self._line.makefile("rwb") as file:
            while len(head := file.read(4)) == 4:
                (size,) = struct.unpack("!I", head)
                answer = json.dumps(self._answer(json.loads(file.read(size))["code"])).encode()
                if os.getpid() != own:  # a copy that the code made: a second answer would be the next call's
                    os._exit(0)
                file.write(struct.pack("!I", len(answer)) + answer)
                file.flush()

    def _answer(self, code: str) -> dict[str, Any]:
        written = Shortened(self._output_chars)
        failed = False
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            try:
                self._execute(code)
            # Whatever the model's code raises is the model's to read: SystemExit and MemoryError too.
            except BaseException as error:  # noqa: BLE001
                failed = True
                written.write(_told(error))
        return {"output": written.text(), "error": failed}

    def _execute(self, code: str) -> None:
        linecache.cache[SOURCE] = (len(code), None, code.splitlines(keepends=True), SOURCE)
        body = ast.parse(code, SOURCE)
        last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, SOURCE, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), SOURCE, "eval"), self._names)
            if value is not None:
                print(repr(value))


class Shortened(io.TextIOBase):
    """A text file that keeps its first characters, and counts the rest."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._parts: list[str] = []
        self._dropped = 0

    def write(self, text: str, /) -> int:
        """Keep what fits."""
        kept = text[: self._left]
        if kept:
            self._parts.append(kept)
            self._left -= len(kept)
        self._dropped += len(text) - len(kept)
        return len(text)

    def text(self) -> str:
        """What was kept, and how much was not."""
        text = "".join(self._parts)
        return f"{text}\n... ({self._dropped} characters more)" if self._dropped else text.rstrip("\n")


def _told(error: BaseException) -> str:
    """The traceback from the model's own code on."""
    trace = traceback.TracebackException.from_exception(error)
    inner = list(itertools.dropwhile(lambda frame: frame.filename != SOURCE, trace.stack))
    frames = "".join(traceback.StackSummary.from_list(inner).format())
    head = "Traceback (most recent call last):\n" if frames else ""
    return head + frames + "".join(trace.format_exception_only())


def main() -> None:
    """Serve the socket that the arguments name."""
    parent = int(sys.argv[3])
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with socket.socket(fileno=int(sys.argv[1])) as control:
        Nursery(json.loads(sys.argv[2])).serve(control)


if __name__ == "__main__":
    main()
