"""The committed stubs are what the protos generate, and the contract breaks no service of a release."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROTOS = REPOSITORY / "protos"
STUBS = REPOSITORY / "sdk/src"
CONTRACT = REPOSITORY / "docs/contract.md"
BUF = str(Path(sys.executable).parent / "buf")


def generated(folder: Path) -> dict[str, bytes]:
    """The stubs below a folder, by their path."""
    found = [*folder.glob("quartet/v1/*_pb2*.py"), *folder.glob("quartet/v1/*_pb2.pyi")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_stubs_are_current(tmp_path: Path) -> None:
    files = sorted(str(path) for path in PROTOS.glob("quartet/v1/*.proto"))
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *out, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    fresh, committed = generated(tmp_path), generated(STUBS)
    assert sorted(fresh) == sorted(committed), "run `make protos`"
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert stale == [], "run `make protos`"


def test_the_documented_command_makes_stubs_in_a_fresh_checkout(tmp_path: Path) -> None:
    (line,) = re.findall(r"^.*python -m grpc_tools.protoc.*$", CONTRACT.read_text(), re.MULTILINE)
    (tmp_path / "protos").symlink_to(PROTOS)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(generated(tmp_path / "stubs")) == sorted(generated(STUBS))


@pytest.mark.parametrize("command", [["lint", str(PROTOS)], ["format", "-d", "--exit-code", str(PROTOS)]])
def test_the_protos_are_clean(command: list[str]) -> None:
    done = subprocess.run([BUF, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def breaking(protos: Path) -> str:
    """What of the protos a service of the newest release does not understand."""
    command = [BUF, "breaking", str(protos), "--against", str(PROTOS / "released.binpb")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def test_the_contract_breaks_no_service_of_the_newest_release() -> None:
    assert breaking(PROTOS) == "", "services are upgraded one at a time: add fields, change none"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("optional double delta = 8;", "optional double delta = 1000;", '"delta"'),
        ("double normalizer = 4;", "uint64 normalizer = 4;", '"normalizer"'),
        ("RATIO_TREATMENT_PPO = 2;", "RATIO_TREATMENT_PPO = 1000;", '"2"'),
    ],
)
def test_a_field_with_another_meaning_is_seen(tmp_path: Path, before: str, after: str, said: str) -> None:
    changed = tmp_path / "protos"
    shutil.copytree(PROTOS, changed)
    proto = changed / "quartet/v1/trainer_service.proto"
    text = proto.read_text()
    assert text.count(before) == 1
    proto.write_text(text.replace(before, after))
    assert said in breaking(changed)
