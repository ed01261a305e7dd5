"""What becomes of templates that workers are forked of: unfit ones, killed ones, too many of them.
template.py 1, 3, 4, 6, templates.py 1-5.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from forked_interpreter import LIBRARY, SECONDS, Interpreter, alive, children
from quartet.errors import QuartetError
from quartet_envhost import adopting as adopting_module
from quartet_envhost import templates as templates_module
from quartet_envhost.process import WorkerDied, WorkerProcess
from quartet_envhost.templates import Templates
from rollout_outcomes import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")


async def test_the_end_of_a_template_is_nothing_to_its_workers_and_the_next_has_a_new_one(
    interpreter: Interpreter, templates: Templates
) -> None:
    """templates.py 1, 2; also where it ends by itself (template.py 5)."""
    before = children()
    worker = await interpreter.worker(templates)
    await asyncio.wait_for(worker.spoke.wait(), SECONDS)
    (template,) = children() - before - {worker.pid}
    os.kill(template, signal.SIGKILL)
    await asyncio.wait_for(until(lambda: not alive(template)), SECONDS)
    later = await interpreter.told(templates)
    assert later["importer"] not in (template, later["pid"]) and interpreter.templates_started == 2
    assert alive(worker.pid) and worker.alive
    assert (await interpreter.loaded(worker))["importer"] == template


#: A front that has a worker whose loop does not turn.


UNFIT = {
    "threads": (
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "its imports have started threads (1)",
    ),
    "descriptors": (
        "import os; left = os.open('/dev/zero', os.O_RDONLY)",
        "have left descriptors open: /dev/zero",
    ),
    "a failing import": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "processes": (
        "import subprocess; left = subprocess.Popen(['sleep', '600'])",
        "its imports have left processes running (1)",
    ),
    "a page of reasons": ("raise ImportError('why, ' * 100_000)", "ImportError: why, why"),
    "an exit": ("import os, sys; '--template' in sys.orig_argv and os._exit(7)", "ended with code 7"),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_a_template_that_is_unfit_is_named_once_and_its_workers_are_spawned(
    interpreter: Interpreter, templates: Templates, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """template.py 3, templates.py 3."""
    code, why = UNFIT[what]
    interpreter.write("library", f"{LIBRARY}\n{code}")
    workers = [await interpreter.worker(templates) for _ in range(2)]
    assert not any(one.forked for one in workers) and interpreter.templates_started == 1
    log = "".join(capfd.readouterr())
    assert log.count("workers are spawned, not forked") == 1 and why in log, log
    for one in workers:
        one.kill("enough")
        await one.wait()


async def test_what_an_interpreter_cannot_run_is_told_by_the_worker(
    interpreter: Interpreter, templates: Templates
) -> None:
    """templates.py 3: the words are those that it always had."""
    interpreter.env["PYTHONPATH"] = ""  # this interpreter has no Verifiers
    worker = await interpreter.worker(templates)
    with pytest.raises(QuartetError, match="has no verifiers; in the repository: "):
        await asyncio.wait_for(worker.open({"id": "x", "args": {}, "max_file_bytes": 1 << 30}), SECONDS)
    assert not worker.forked
    with pytest.raises(WorkerDied, match="interpreter /nowhere/python does not start: No such file"):
        await WorkerProcess.spawn("/nowhere/python", {}, templates)


async def test_an_interpreter_of_an_earlier_release_has_spawned_workers(
    interpreter: Interpreter, templates: Templates, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    refuses = 'case "$*" in *--template*) exit 2;; esac'
    python.write_text(f'#!/bin/sh\n{refuses}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    worker = await WorkerProcess.spawn(str(python), interpreter.env, templates)
    await asyncio.wait_for(worker.spoke.wait(), SECONDS)
    assert not worker.forked
    await worker.stop()


async def test_threads_that_their_library_ends_at_a_fork_keep_nobody_from_it(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 3: numpy's matrix products have as many threads as in a spawned worker."""
    interpreter.env["OPENBLAS_NUM_THREADS"] = "2"
    interpreter.write("library", f"{LIBRARY}\nimport numpy")
    spawned, forked = [await interpreter.told(one, "computes") for one in (None, templates)]
    assert forked["same"]["threads"] == spawned["same"]["threads"] == "2"
    assert forked["importer"] != forked["pid"]


async def test_an_environment_that_was_changed_is_read_anew(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 1; also where the clock of files has not moved on since the template looked."""
    before = interpreter.own.stat()
    await interpreter.told(templates)
    for code in ("before", "and after"):
        (interpreter.own / "my_env.py").write_text(f"CODE = {code!r}\n")
        os.utime(interpreter.own, ns=(before.st_atime_ns, before.st_mtime_ns))
        told = await interpreter.told(templates, "code")
        assert told["code"] == code and told["importer"] != told["pid"]
    assert interpreter.templates_started == 1


async def test_an_interpreter_whose_packages_were_changed_has_a_new_template(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 4: also a package that is there by a path file, which only a start reads."""
    first, second = [await interpreter.told(templates) for _ in range(2)]
    (interpreter.packages / "installed.pth").write_text("import installed\n")
    third = await interpreter.told(templates)
    assert first["importer"] == second["importer"] != third["importer"] != third["pid"]


async def test_each_set_of_variables_has_a_template_of_its_own(
    interpreter: Interpreter, templates: Templates
) -> None:
    """templates.py 2: they count while imports run."""
    first = await interpreter.told(templates)
    interpreter.env["MORE"] = "of another"
    second = await interpreter.told(templates)
    assert second["same"]["environment"]["MORE"] == "of another" and first["importer"] != second["importer"]


async def test_whoever_stops_waiting_leaves_no_process(
    interpreter: Interpreter, templates: Templates, tmp_path: Path
) -> None:
    """templates.py 5; the template goes on with what it began."""
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    interpreter.write("library", f"{LIBRARY}\n{waits}")
    before = children()
    waiting = asyncio.create_task(interpreter.worker(templates))
    await asyncio.wait_for(until((tmp_path / "started").exists), SECONDS)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    go.touch()
    told = await interpreter.told(templates)
    assert interpreter.templates_started == 1
    await asyncio.wait_for(until(lambda: children() - before == {told["importer"]}), SECONDS)


async def test_a_template_that_is_not_ready_in_time_is_killed(
    interpreter: Interpreter, capfd: pytest.CaptureFixture[str]
) -> None:
    """templates.py 4."""
    interpreter.write(
        "library", f"{LIBRARY}\nimport sys, time\n'--template' in sys.orig_argv and time.sleep(600)"
    )
    before, templates = children(), Templates(0.5)
    worker = await interpreter.worker(templates)
    assert not worker.forked and "not ready within 0.5 s" in "".join(capfd.readouterr())
    assert children() - before == {worker.pid}
    await worker.stop()
    worker = await interpreter.worker(templates)
    assert not worker.forked and interpreter.templates_started == 1, "the next start does not wait for it"
    await worker.stop()


async def test_what_imports_have_started_ends_with_the_template(interpreter: Interpreter) -> None:
    """templates.py 4."""
    waits = "subprocess.run('echo $$ > $PIDS; exec sleep 600', shell=True)"
    interpreter.write(
        "library", f"{LIBRARY}\nimport sys, subprocess\n'--template' in sys.orig_argv and {waits}"
    )
    pids = interpreter.folder / "pids"
    interpreter.env["PIDS"] = str(pids)
    templates = Templates(SECONDS)
    waiting = asyncio.create_task(interpreter.worker(templates))
    await asyncio.wait_for(until(lambda: pids.exists() and pids.read_text().endswith("\n")), SECONDS)
    await templates.close()
    await asyncio.wait_for(until(lambda: not alive(int(pids.read_text()))), SECONDS)
    await (await waiting).stop()


async def test_a_template_that_is_killed_as_it_starts_is_tried_again(
    interpreter: Interpreter, templates: Templates, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """templates.py 3: that says nothing of the next."""
    mark = tmp_path / "full"
    kills = "'--template' in sys.orig_argv and os.kill(importer, 9)"
    interpreter.write("library", f"{LIBRARY}\nimport sys; os.path.exists({str(mark)!r}) and {kills}")
    mark.touch()
    told = await interpreter.told(templates)
    assert told["importer"] == told["pid"]
    assert "their template was killed by signal 9" in "".join(capfd.readouterr())
    mark.unlink()
    told = await interpreter.told(templates)
    assert told["importer"] != told["pid"]


async def test_a_template_that_stands_still_is_killed(
    interpreter: Interpreter,
    templates: Templates,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """templates.py 4; what forked before is tried again."""
    monkeypatch.setattr(templates_module, "FORK_SECONDS", 2.0)
    for _ in range(2):
        forked = await interpreter.told(templates)
        assert forked["importer"] != forked["pid"]
        os.kill(forked["importer"], signal.SIGSTOP)
        told = await interpreter.told(templates)
        assert told["importer"] == told["pid"]
        assert "their template did not fork within 2 s" in "".join(capfd.readouterr())
        assert not alive(forked["importer"])
    assert (await interpreter.told(templates))["importer"] != told["pid"]
    assert interpreter.templates_started == 3


#: A fork of which the template, who is between it and the worker, or the worker comes to harm.
HARMED = """
import os, signal, time
fork = os.fork
def harmed():
    who = os.getpid()
    pid = fork()
    if who == importer:
        at = "template" if pid else "between"
    else:
        at = "between, later" if pid else "worker"
    HARM
    return pid
os.fork = harmed
"""
HARMS = {
    "the template": ('if at == "between, later": os.kill(importer, 9); time.sleep(0.1)', True),
    "between, with a worker": ('if at == "between, later": os.kill(os.getpid(), 9)', True),
    "between, without": ('if at == "between": os.kill(os.getpid(), 9)', False),
    "the worker": ('if at == "worker": os.kill(os.getpid(), 9)', False),
    "the worker, stopped": ('if at == "worker": os.kill(os.getpid(), signal.SIGSTOP)', False),
}


@pytest.mark.parametrize("who", HARMS)
async def test_a_kill_amid_a_fork_leaves_no_process_and_each_worker_its_own_line(
    interpreter: Interpreter, templates: Templates, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """template.py 6, templates.py 4: also of the next; the fixture sees whether all were waited for."""
    monkeypatch.setattr(templates_module, "FORK_SECONDS", 1.0)
    harm, forked = HARMS[who]
    interpreter.write("library", LIBRARY + HARMED.replace("HARM\n", f"{harm}\n"))
    workers = [await interpreter.worker(templates) for _ in range(2)]
    assert [one.forked for one in workers] == [forked] * 2
    told = [await interpreter.loaded(one) for one in workers]
    assert [one["pid"] for one in told] == [one.pid for one in workers]


async def test_templates_that_do_not_fork_are_not_started_for_ever(
    interpreter: Interpreter, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """templates.py 4."""
    monkeypatch.setattr(templates_module, "FORK_SECONDS", 0.2)
    interpreter.write("library", LIBRARY + HARMED.replace("HARM\n", "time.sleep(600)\n"))
    for _ in range(3):
        await (await interpreter.worker(templates)).stop()
    assert interpreter.templates_started == 2


async def test_workers_are_forked_where_ends_of_children_are_ignored(
    interpreter: Interpreter, templates: Templates
) -> None:
    """template.py 6: as whoever started the front may have it; each answer is to its own request."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        for _ in range(5):
            worker = await interpreter.worker(templates)
            with pytest.raises(QuartetError, match="that is all"):
                await asyncio.wait_for(worker.open({"args": "", "max_file_bytes": 1 << 30}), SECONDS)
            await asyncio.wait_for(worker.wait(), SECONDS)
            assert worker.forked and (interpreter.folder / f"told.py.{worker.pid}").exists()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert interpreter.templates_started == 1


async def test_no_more_templates_are_kept_than_may_be(
    interpreter: Interpreter, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """templates.py 2."""
    monkeypatch.setattr(templates_module, "MAX_TEMPLATES", 2)
    before, importers = children(), []
    for one in "abacb":
        interpreter.env["MORE"] = one
        importers.append((await interpreter.told(templates))["importer"])
    a, b, again, c, anew = importers
    assert again == a and anew != b
    assert children() - before == {c, anew}


@pytest.mark.parametrize("who", ["==", "!="])
async def test_a_template_that_cannot_fork_says_so_and_may_later(
    interpreter: Interpreter,
    templates: Templates,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    who: str,
) -> None:
    """templates.py 3; itself, or who is between it and a worker."""
    full = tmp_path / "full"
    refuses = f"""
import errno, os
fork = os.fork
def refused():
    if os.path.exists({str(full)!r}) and os.getpid() {who} importer:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = refused
"""
    interpreter.write("library", f"{LIBRARY}\n{refuses}")
    full.touch()
    told = await interpreter.told(templates)
    assert told["importer"] == told["pid"]
    assert "cannot be forked: Resource temporarily unavailable" in "".join(capfd.readouterr())
    full.unlink()
    told = await interpreter.told(templates)
    assert told["importer"] != told["pid"] and interpreter.templates_started == 1


async def test_orphans_that_were_adopted_all_the_same_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """adopting.py 2."""
    monkeypatch.setattr(adopting_module, "COLLECT_S", 0.05)
    before = children()
    with adopting_module.adopting():
        leaves = ("sh", "-c", "sleep 0.1 &")
        await (await asyncio.create_subprocess_exec(*leaves, start_new_session=True)).wait()
        (orphan,) = children() - before
        await asyncio.wait_for(until(lambda: not alive(orphan)), SECONDS)
    assert orphan in children()
    await asyncio.wait_for(until(lambda: children() <= before), SECONDS)
