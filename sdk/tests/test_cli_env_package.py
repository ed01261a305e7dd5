"""`quartet env install`: what it is asked for, and that pip gets it there, from a repository or an index."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pip
import pytest
from quartet.cli.addresses import without_user
from quartet.cli.env import install as installing
from quartet.cli.env.package import Package, package
from quartet.cli.env.scaffold import write_package
from quartet.config import ConfigError

HUB, MORE = "https://hub.example/simple", "https://more.example/simple"


def test_what_is_installed_is_a_folder_or_a_name(tmp_path: Path) -> None:
    folder = write_package("my-env", tmp_path)
    assert package(str(folder)) == Package("my-env", ("-e", str(folder)))
    assert package("some-env[extra]>=1.0") == Package("some-env", ("some-env[extra]>=1.0",))


def test_a_plain_name_is_that_of_an_own_folder_before_any_index_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """package.py 3"""
    monkeypatch.chdir(tmp_path)
    folder = write_package("my-env", Path("environments"))
    own = Package("my-env", ("-e", str(folder.absolute())))
    assert package("my-env") == package("my_env") == own
    assert package("other-env").what == ("other-env",)
    # Whoever says more than its name means the index.
    assert package("my-env==0.1.0").what == ("my-env==0.1.0",)
    assert package("my-env", index_url=HUB).what == ("my-env",)
    assert package("owner/my-env", index_url=HUB).what == ("my-env",)


def test_the_data_of_a_written_package_is_in_its_wheel(tmp_path: Path) -> None:
    """templates/pyproject.toml.txt, by the build backend that it names"""
    folder = write_package("my-env", tmp_path)
    files = {"my_env/tasks.jsonl", "my_env/data/more.jsonl"}
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"question": "2+2", "answer": "4"}\n')
    build = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir"]
    subprocess.run([sys.executable, "-m", "pip", *build, str(tmp_path / "wheels"), str(folder)], check=True)
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if name.startswith("my_env/")}
    assert held == {*files, "my_env/__init__.py", "my_env/taskset.py", "my_env/oracle.py"}


def test_a_direct_reference_is_pips() -> None:
    for target in (
        "some-env @ git+https://host.example/some/env@v1.0#subdirectory=environments/some_env",
        "some-env@git+file:///srv/some_env",
        "some-env[extra] @ https://host.example/some_env-1.0-py3-none-any.whl",
    ):
        assert package(target) == Package("some-env", (target,))


def test_an_index_is_handed_over_and_its_owner_has_no_other() -> None:
    """package.py 1"""
    both = ("--index-url", HUB, "--extra-index-url", MORE)
    assert package("some-env", HUB, [MORE]) == Package("some-env", ("some-env",), both, both)
    alone = ("--index-url", HUB)
    assert package("owner/some-env@1.2", HUB, [MORE]) == Package("some-env", ("some-env==1.2",), alone, both)
    beside = ("--extra-index-url", HUB)
    assert package("owner/some-env@latest", None, [HUB]) == Package("some-env", ("some-env",), alone, beside)


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nameless").mkdir()
    (tmp_path / "nameless" / "pyproject.toml").write_text('[project]\nname = ".."')
    for bad, why in (
        ("owner/some-env", "give the index that has it"),
        (str(tmp_path), "has no pyproject.toml"),
        ("==1.0", "neither a folder nor the name"),
        (str(tmp_path / "nameless"), "gives no name of a package under"),
        ("git+https://me:secret@host.example/env", r"write 'NAME @ git\+https://\*\*\*\*@host.example/env'$"),
    ):
        with pytest.raises(ConfigError, match=why):
            package(bad)
    for bad in ("owner/some/env", "owner/some-env==1.0", "/srv/some_env"):
        with pytest.raises(ConfigError, match="write OWNER/NAME, or OWNER/NAME@VERSION"):
            package(bad, HUB)


def test_promise_2_what_a_url_says_of_a_user_is_not_shown() -> None:
    said = "some-env @ git+https://me:secret@host.example/some/env@v1 from https://token@host.example"
    assert without_user(said) == (
        "some-env @ git+https://****@host.example/some/env@v1 from https://****@host.example"
    )
    assert without_user("https://me:s@cret@host.example/some@v1") == "https://****@host.example/some@v1"


#: A package with a build backend of its own, which needs nothing of an index.
PROJECT = """
[project]
name = "some-env"
version = "1.0"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import pathlib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    wheel = pathlib.Path(folder) / "some_env-1.0-py3-none-any.whl"
    info = "some_env-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("some_env.py", "import verifiers.v1 as vf")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: some-env\\nVersion: 1.0\\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr(f"{info}/RECORD", "some_env.py,,\\n")
    return wheel.name
"""


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with pip and nothing else, for which Quartet itself is not installed."""
    venv.create(folder := tmp_path / "venv", with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    monkeypatch.setattr(installing, "_ours", lambda package, extra: [])
    monkeypatch.setattr(installing.shutil, "which", lambda name, path: None)  # pip alone
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return folder / "bin" / "python"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    return folder


@contextmanager
def index(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A package index on this machine, and what was asked of it."""
    asked: list[str] = []

    class Answer(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Answer, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple", asked
        server.shutdown()


def test_what_uv_installs_is_compiled_as_what_pip_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n')
    uv.chmod(0o755)
    # Beside the interpreter of the command, as `make install` has it, and not on the shell's path.
    monkeypatch.setattr(installing.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/bin")
    installing._pip(Path("/of/it/python"), ["some-env"], [])
    asked = "pip install -q --compile-bytecode --python /of/it/python some-env\n"
    assert (tmp_path / "asked").read_text() == asked


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_repository_is_installed(
    interpreter: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    asked = package(f"some-env @ git+file://{repository}")
    assert installing.install(asked, None, interpreter) == interpreter
    assert "some-env: a v1 package" in capsys.readouterr().out


def test_a_package_of_an_index_is_installed(interpreter: Path, repository: Path, tmp_path: Path) -> None:
    project = tmp_path / "served" / "simple" / "some-env"
    project.mkdir(parents=True)
    exec(BACKEND, scope := {})
    wheel = scope["build_wheel"](project)
    (project / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
    with index(tmp_path / "served") as (url, asked):
        installing.install(package("owner/some-env@1.0", url), None, interpreter)
        assert f"/simple/some-env/{wheel}" in asked
        with pytest.raises(ConfigError, match=r"some-env==2\.0 cannot be installed: ERROR: .*==2\.0"):
            installing.install(package("owner/some-env@2.0", url), None, interpreter)
