"""The token of a launch and who finds it (quartet.kit.launched, invariants 1 to 3)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quartet.config import ConfigError
from quartet.kit import channel, launched
from quartet.kit.channel import ClientSecurity
from quartet.kit.health import Health
from quartet.kit.launched import Announcement, make_token, token_at
from quartet.kit.server import ServerConfig, start
from test_kit_security import SERVICE, ask, refusal_on

ADDRESS = "127.0.0.1:5001"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's launches are announced."""
    monkeypatch.setattr(launched, "PARENT", tmp_path)
    monkeypatch.setattr(launched, "RUNTIME", tmp_path / "none")
    return tmp_path / f"quartet-{os.geteuid()}"


def test_each_launch_has_a_token_of_its_own(tmp_path: Path) -> None:
    """launched.py 1."""
    file = tmp_path / "data" / "token"
    make_token(file)
    first = file.read_text()
    make_token(file)
    assert len(first.strip()) >= launched.TOKEN_BYTES and file.read_text() != first
    assert file.stat().st_mode & 0o777 == 0o600 and list(file.parent.iterdir()) == [file]


def test_a_launch_that_goes_on_is_found_by_its_addresses_alone(folder: Path, tmp_path: Path) -> None:
    """launched.py 2."""
    file = tmp_path / "token"
    make_token(file)
    assert token_at(ADDRESS) is None
    announced = Announcement([ADDRESS], file)
    assert folder.stat().st_mode & 0o777 == 0o700
    for address in (ADDRESS, "localhost:5001"):
        found = token_at(address)
        assert found is not None and found.accepts(file.read_text().strip())
    for address in ("127.0.0.1:5002", "[::1]:5001", f"../{ADDRESS}"):
        assert token_at(address) is None, address
    announced.close()
    assert token_at(ADDRESS) is None and not list(folder.iterdir())


@pytest.mark.parametrize("of", ["folder", "file"])
def test_what_others_could_have_written_is_not_used(folder: Path, tmp_path: Path, of: str) -> None:
    """launched.py 2."""
    file = tmp_path / "token"
    make_token(file)
    announced = Announcement([ADDRESS], file)
    assert token_at(ADDRESS) is not None
    (folder if of == "folder" else file).chmod(0o755)
    assert token_at(ADDRESS) is None
    if of == "folder":
        with pytest.raises(ConfigError, match="is not his alone; remove it"):
            Announcement([ADDRESS], file)
    announced.close()


def test_a_folder_that_somebody_else_made_first_stops_no_launch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launched.py 2."""
    folder.mkdir(mode=0o755)  # as that of another user would be
    file, own = tmp_path / "token", tmp_path / "run" / str(os.geteuid())
    own.mkdir(parents=True, mode=0o700)
    make_token(file)
    monkeypatch.setattr(launched, "RUNTIME", tmp_path / "run")
    announced = Announcement([ADDRESS], file)
    assert token_at(ADDRESS) is not None and not list(folder.iterdir())
    assert (own / "quartet").stat().st_mode & 0o777 == 0o700
    announced.close()
    assert token_at(ADDRESS) is None


def test_a_killed_launcher_counts_for_nothing(folder: Path, tmp_path: Path) -> None:
    """launched.py 3."""
    file = tmp_path / "token"
    make_token(file)
    script = f"""
import os, pathlib
from quartet.kit import launched
launched.PARENT = pathlib.Path({str(tmp_path)!r})
kept = launched.Announcement([{ADDRESS!r}], pathlib.Path({str(file)!r}))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (folder / ADDRESS).is_symlink() and token_at(ADDRESS) is None
    other = tmp_path / "other"
    make_token(other)
    announced = Announcement(["127.0.0.1:5002"], other)
    assert [link.name for link in folder.iterdir()] == ["127.0.0.1:5002"]
    announced.close()


@pytest.mark.parametrize("removes", ["a launch that begins", "a launch that ends"])
def test_a_launch_that_takes_an_address_just_when_another_gives_it_up_keeps_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: str
) -> None:
    """launched.py 2 and 3: between the look at what goes, and its end."""
    gone, taking, other = files = [tmp_path / name for name in ("gone", "taking", "other")]
    for file in files:
        make_token(file)
    Announcement([], other).close()
    (folder / ADDRESS).symlink_to(gone)
    launches = [Announcement([ADDRESS], gone)] if removes == "a launch that ends" else []
    rename = Path.rename

    def taken_meanwhile(link: Path, to: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        launches.append(Announcement([ADDRESS], taking))
        return rename(link, to)

    monkeypatch.setattr(Path, "rename", taken_meanwhile)
    if launches:
        launches.pop(0).close()
    else:
        Announcement([], other).close()
    found = token_at(ADDRESS)
    assert found is not None and found.accepts(taking.read_text().strip())
    assert [link.name for link in folder.iterdir()] == [ADDRESS]
    launches[0].close()
    assert not list(folder.iterdir())


def test_who_clears_what_is_old_finds_the_folder_locked_until_the_last_launch_ends(
    folder: Path, tmp_path: Path
) -> None:
    """launched.py 4."""
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        make_token(file)
    launches = [Announcement([f"127.0.0.1:{at}"], file) for at, file in enumerate(files)]
    cleaner = os.open(folder, os.O_RDONLY)
    for launch in launches:
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        launch.close()
    fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)


def test_an_address_of_an_earlier_launch_of_the_same_file_is_none_of_this_one(
    folder: Path, tmp_path: Path
) -> None:
    """launched.py 2: it was killed, and whoever listens there now is somebody else."""
    file = tmp_path / "token"
    make_token(file)
    folder.mkdir(mode=0o700)
    (folder / ADDRESS).symlink_to(file)
    killed = time.time() - 2
    os.utime(folder / ADDRESS, (killed, killed), follow_symlinks=False)
    announced = Announcement(["127.0.0.1:5002"], file)
    assert token_at(ADDRESS) is None and token_at("127.0.0.1:5002") is not None
    announced.close()


def test_a_launch_whose_file_cannot_be_seen_from_here_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """launched.py 3: as in another container, for which the same /tmp holds other mounts."""
    file, other = tmp_path / "token", tmp_path / "other"
    make_token(file)
    make_token(other)
    announced = Announcement([ADDRESS], file)
    file.rename(away := tmp_path / "away")
    Announcement(["127.0.0.1:5002"], other).close()
    away.rename(file)
    assert token_at(ADDRESS) is not None, "it goes on"
    announced.close()
    (folder / ADDRESS).symlink_to(tmp_path / "none")
    old = time.time() - launched.LEFT_SECONDS - 1
    os.utime(folder / ADDRESS, (old, old), follow_symlinks=False)
    Announcement(["127.0.0.1:5002"], other).close()
    assert not list(folder.iterdir()), "no launch is as old"


async def test_a_client_shows_it_there_whatever_it_was_given_for_others(folder: Path, tmp_path: Path) -> None:
    """launched.py 2."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    make_token(ours)
    make_token(theirs)
    config = [ServerConfig(address="127.0.0.1:0", token_file=file) for file in (ours, theirs)]
    servers = [await start([SERVICE], one, Health()) for one in config]
    announced = await asyncio.to_thread(Announcement, [servers[0].address], ours)

    given = ClientSecurity(token_file=theirs)
    try:
        for server in servers:
            assert await ask(server.address, given) == "OK"
        assert await ask(servers[0].address, ClientSecurity()) == "OK"
        assert await ask(servers[1].address, ClientSecurity()) == "UNAUTHENTICATED", "ours is not shown there"
        announced.close()
        assert await ask(servers[0].address, ClientSecurity()) == "UNAUTHENTICATED"
    finally:
        for server in servers:
            await server.stop(0)


async def test_a_channel_is_there_before_a_launch_and_outlives_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """channel.py 2, launched.py 2: a notebook keeps its channel, and the run is started again elsewhere."""
    monkeypatch.setattr(channel, "LOOK_SECONDS", 0.0)
    made = folder.with_name("one")
    make_token(made)
    server = await start([SERVICE], ServerConfig(address="127.0.0.1:0", token_file=made), Health())
    other = folder.with_name("other")
    make_token(other)
    async with channel.connect(server.address) as kept:
        for file in (None, made, None, other, made):
            launch = file and await asyncio.to_thread(Announcement, [server.address], file)
            refused = await refusal_on(kept)
            assert (refused is None) == (file == made), file
            if launch:
                launch.close()
    await server.stop(0)
