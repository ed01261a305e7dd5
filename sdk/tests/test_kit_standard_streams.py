"""Standard streams that were closed for a process (`>&-`), whose reader has left (`| head`, a closed
terminal), or whose disk is full."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quartet.cli import __main__ as command
from quartet.cli.clients import run_line
from quartet.cli.display import Plain
from quartet.cli.eval.board import LiveBoard
from quartet.cli.live import LiveScreen
from quartet.cli.progress import Completion, Progress
from quartet.errors import QuartetError
from quartet.kit.standard_streams import say
from quartet.v1.orchestrator_service_pb2 import Run

#: What a process does that asks what its output is, opens a file, and prints.
COMMAND = """
import sys
from quartet.cli import __main__ as command

def work(options, rest):
    terminal = sys.stdout.isatty()
    with open(__file__) as file:
        assert file.fileno() > 2, "a number that libraries write to"
    print("a line", terminal, flush=%s)
    return 0

command.dispatch = work
sys.exit(command.main(["init"]))
"""


@pytest.fixture
def unread() -> Iterator[int]:
    """Where one may write to, and nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def _run_unread(unread: int, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_what_is_closed_leads_nowhere(closed: str, tmp_path: Path) -> None:
    """standard_streams.py 1."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND % False)
    command = ["sh", "-c", f'exec "$0" "$1" {closed}', sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("flush", [True, False])
def test_a_command_that_nobody_reads_ends_without_a_word(flush: bool, unread: int, tmp_path: Path) -> None:
    """standard_streams.py 2."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND % flush)
    done = _run_unread(unread, str(script))
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_answer_of_the_arguments_that_nobody_reads_ends_without_a_word(unread: int) -> None:
    """`quartet --version | true`: argparse answers, before any command does."""
    done = _run_unread(unread, "-m", "quartet.cli.__main__", "--version")
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_service_that_prints_to_nobody_ends_without_a_word(unread: int) -> None:
    code = "import sys; from quartet.config import Config, main; sys.exit(main(Config, print, ['--dry-run']))"
    done = _run_unread(unread, "-c", code)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_is_shown_of_a_run_goes_on_without_a_reader(unread: int) -> None:
    """standard_streams.py 2: what leads elsewhere is left alone."""
    with open(unread, "w", closefd=False) as out:
        plain = Plain(out)
        assert plain.is_read
        plain.say("one")
        plain.say("two")
        assert not plain.is_read
        assert os.path.samestat(os.fstat(unread), os.stat(os.devnull))
    assert not os.path.samestat(os.fstat(2), os.stat(os.devnull))


def test_what_leads_to_the_same_place_is_unread_too(unread: int) -> None:
    """standard_streams.py 2."""
    code = (
        "import sys; from quartet.cli.display import Plain; Plain().say('one'); print('two', flush=True); "
        "print('three', file=sys.stderr, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=unread, stderr=unread, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("screen", [Plain, LiveScreen, lambda: LiveBoard([])], ids=["plain", "rl", "eval"])
def test_what_is_shown_goes_on_when_its_terminal_is_closed(
    screen: Callable[[], Plain | LiveScreen | LiveBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """standard_streams.py 2, 3: `quartet rl &`, then the window is closed."""
    near, far = pty.openpty()
    with open(far, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        shown = screen()
        os.close(near)
        shown.say("a line")
        shown.close()
        print("what comes after it", flush=True)


#: Fills the clipboard, moves the cursor, rings; the same in C1, which few terminals know.
HOSTILE = "a\x1b]52;c;ZXZpbA==\x07\x1b[2Jb\r\x9b31m[/c]"


@pytest.mark.parametrize("make", [Plain, LiveScreen, lambda: LiveBoard([])], ids=["plain", "rl", "eval"])
def test_foreign_text_commands_no_terminal(
    make: Callable[[], Plain | LiveScreen | LiveBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """standard_streams.py 5: a completion, a note, an error of an environment."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    screen = make()
    screen.say(HOSTILE)
    if isinstance(screen, LiveScreen):
        progress = Progress()
        progress.completions.append(Completion(1, HOSTILE, HOSTILE, 0.5))
        screen.tick(progress, [])
    screen.close()
    told = out.getvalue()
    assert "\x1b]52" not in told and "\x1b[2J" not in told and "\x9b" not in told and "\x07" not in told
    assert "[/c]" in told and r"a\x1b]52" in told


def test_an_error_of_a_server_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """standard_streams.py 5."""

    def refused(*_: object) -> int:
        raise QuartetError("INVALID_REQUEST", HOSTILE, field="f")

    monkeypatch.setattr(command, "dispatch", refused)
    assert command.main(["init"]) != 0
    assert "\x1b" not in capsys.readouterr().err
    assert "\x1b" not in run_line(Run(run_id="r", error=HOSTILE))


def test_a_command_ends_without_a_word_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """standard_streams.py 2."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND % True)
    near, far = pty.openpty()
    os.close(near)
    done = _run_unread(far, str(script))
    os.close(far)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_is_shown_goes_on_upon_a_full_disk() -> None:
    """standard_streams.py 3."""
    code = (
        "import sys; from quartet.cli.display import Plain; plain = Plain()\n"
        "for _ in range(300): plain.say('x' * 100)\n"
        "print(plain.is_read, file=sys.stderr)"
    )
    with Path("/dev/full").open("wb") as full:
        said = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, check=False)
    assert said.stderr.startswith(b"True\n")


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape"], ids=["a locale", "that of C"])
def test_letters_that_a_stream_lacks_are_escaped(tmp_path: Path, encoding: str) -> None:
    """standard_streams.py 4."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND.replace('"a line"', r'"\u00e9 \udcff"') % False)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, rb"\xe9 \udcff False" + b"\n")


def test_what_a_script_is_told_is_escaped_as_well() -> None:
    """standard_streams.py 4: its own streams are not set up by a command of ours."""
    code = r"import sys; from quartet.kit.standard_streams import say; say('\u00e9 \ufffd', sys.stdout)"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert done.stdout == b"\xe9 \\ufffd\n"


def test_what_a_script_put_in_the_place_of_a_stream_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """standard_streams.py 6."""

    class Tee:
        def __init__(self) -> None:
            self.told = list[str]()

        def write(self, text: str) -> None:
            if "full" in text:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.told.append(text)

        def flush(self) -> None: ...

    tee = Tee()
    monkeypatch.setattr(sys, "stdout", tee)
    assert all(say(line, sys.stdout) for line in ("one", "full", "two \ufffd"))
    assert "".join(tee.told) == "one\ntwo \ufffd\n"


def test_another_pipe_that_breaks_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(command, "dispatch", work)
    assert command.main(["init"]) == 1
    assert capfd.readouterr().err == "error: Broken pipe\n"


def test_a_line_that_cannot_be_logged_is_lost_and_nothing_else() -> None:
    """The disk of the logs is full."""
    code = (
        "import structlog; from quartet.kit import logs; logs.configure('x'); log = structlog.get_logger()\n"
        "for _ in range(300): log.info('a line', padding='x' * 100)\n"
        "print('done')"
    )
    with Path("/dev/full").open("wb") as full:
        said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, check=False)
    assert said.stdout == b"done\n"
