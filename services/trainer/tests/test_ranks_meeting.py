"""Ranks of one machine meet where nobody else can come: promises of quartet_trainer.ranks.meeting."""

from __future__ import annotations

import ipaddress
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .ranked import END_SECONDS as DRAIN_SECONDS
from .ranked import START_SECONDS, Ranked, alive, by_torchrun, running

LISTENS = "0A"
#: Ranks end within this. On a machine that is shared.
END_SECONDS = 10.0


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    """Two ranks, as the key `ranks` starts them."""
    with running(tmp_path_factory.mktemp("ranks"), ["-m", "quartet_trainer"], ranks=2) as group:
        group.wait_served()
        yield group


def sockets(pid: int) -> set[str]:
    """Of a process, by the numbers that the kernel gives them."""
    links = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def listening_at(pid: int) -> list[str]:
    """The addresses at which a process takes connections."""
    own, found = sockets(pid), []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in own:
                found.append(socket.inet_ntop(family, packed(words[1].partition(":")[0])))
    return found


def packed(digits: str) -> bytes:
    """An address as the kernel writes it: words of 32 bits, each in the machine's order."""
    return b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))


def test_torchrun_listens_nowhere(group: Ranked) -> None:
    """meeting.py 1."""
    assert listening_at(group.process.pid) == []


def test_ranks_listen_on_this_machine_alone(group: Ranked) -> None:
    """meeting.py 2; where the first one serves, too."""
    for rank in (0, 1):
        heard = [ipaddress.ip_address(one) for one in listening_at(group.rank_pid(rank))]
        assert heard, "gloo listens"
        assert all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in heard), heard


def test_the_place_has_no_name_and_is_the_groups(group: Ranked) -> None:
    """meeting.py 3."""
    held = [str(one.readlink()) for one in Path(f"/proc/{group.process.pid}/fd").iterdir()]
    assert sum(one.startswith("/memfd:quartet-") for one in held) == 2


def test_told_to_end_before_they_serve_ranks_end_as_one_process_does(tmp_path: Path) -> None:
    """agent.py 2: at moments of the start, the last of which is that of the first rank."""
    seed = random.randrange(1 << 16)
    drawn = random.Random(seed)
    moments: list[float | None] = [*(drawn.uniform(at, at + 0.7) for at in (0.2, 0.9, 1.6, 2.3)), None]
    for number, moment in enumerate(moments):
        print(f"seed {seed}: told after {moment or 'the start of a rank'}")
        with running(tmp_path / str(number), ["-m", "quartet_trainer"], ranks=2) as group:
            if moment is None:
                wait_for_a_rank(group)
            else:
                time.sleep(moment)
            ranks = group.children()
            group.process.send_signal(signal.SIGTERM)
            code = group.process.wait(END_SECONDS)
        said = group.log.read_text()
        # A machine may be so fast that they serve.
        assert code == (0 if group.port_file.exists() else -signal.SIGTERM), said[-4000:]
        assert "Traceback" not in said and not alive(ranks), said[-4000:]
        assert not ranks or '"event": "stopped"' in said


def wait_for_a_rank(group: Ranked) -> None:
    """Until torchrun has started one."""
    deadline = time.monotonic() + START_SECONDS
    while not group.children():
        assert group.process.poll() is None and time.monotonic() < deadline, group.log.read_text()[-4000:]
        time.sleep(0.002)


@pytest.mark.parametrize("command", [["-m", "quartet_trainer"], by_torchrun(2)], ids=["key", "by_hand"])
def test_a_rank_that_still_imports_dies_with_torchrun(tmp_path: Path, command: list[str]) -> None:
    """quartet_trainer.__main__: importing torch takes seconds, and torchrun may be dead by then."""
    ranks = {"ranks": 2} if command == ["-m", "quartet_trainer"] else {}
    with running(tmp_path / "ranks", command, **ranks) as group:
        deadline = time.monotonic() + START_SECONDS
        while len(pids := group.children()) < 2 or not all(map(imports_torch, pids)):
            assert group.process.poll() is None and time.monotonic() < deadline, group.log.read_text()[-4000:]
            time.sleep(0.02)
        group.process.kill()
        group.process.wait()
        assert "rank_joined" not in group.log.read_text()
        deadline = time.monotonic() + END_SECONDS
        while alive(pids):
            time.sleep(0.05)
            assert time.monotonic() < deadline


def imports_torch(pid: int) -> bool:
    """Whether a process has come as far as that."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_ranks_that_are_told_to_end_end_well(group: Ranked) -> None:
    """agent.py 1: as one process does, and nobody takes it for a crash. The last one: nothing is left.

    One that dies is no good end: test_ranks_context.py.
    """
    ranks = group.children()
    assert len(ranks) == 2, "the key starts torchrun"
    group.process.send_signal(signal.SIGTERM)
    code, said = group.process.wait(DRAIN_SECONDS), group.log.read_text()
    assert code == 0, said[-4000:]
    assert '"event": "stopped"' in said and not any(
        crash in said for crash in ("Traceback", "Signal", "rank_ended")
    )
    assert not alive(ranks)
