"""What an environment consists of (consists.py): real workers load a package before and after it changed; and
the files that count, of packages as they are installed."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosting import LastingTemplates, serving
from quartet.v1 import envhost_service_pb2 as pb
from quartet_envhost import consists
from scripted_inference import ScriptedInference, serve_scripted

PACKAGE = """
import json
from pathlib import Path

import verifiers.v1 as vf

from moving_env.scoring import earned


class Data(vf.TaskData):
    word: str


class Task(vf.Task[Data]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return earned(trace.last_reply, self.data.word)


class Config(vf.TasksetConfig):
    first: int = 0
    last: int = 100


class Moving(vf.Taskset[Task, Config]):
    def load(self):
        words = json.loads(Path(__file__).with_name("words.json").read_text())
        return [
            Task(Data(idx=at, prompt=f"Say {word}.", word=word), self.config.task)
            for at, word in enumerate(words)
            if self.config.first <= at < self.config.last
        ]


__all__ = ["Moving"]
"""
SCORING = "def earned(said, word):\n    return float(word in said)\n"
REF = pb.EnvironmentRef(id="moving-env", args_json='{"first": 0, "last": 5}')


def write(folder: Path, version: str = "0.1.0") -> Path:
    """The package in a folder, with what a checkout that was installed has beside it."""
    package = folder / "moving_env"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "scoring.py").write_text(SCORING)
    (package / "words.json").write_text('["red", "green", "blue"]')
    told = folder / f"moving_env-{version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: moving-env\nVersion: {version}\n")
    return package


def settings(python: str, folders: str, **more: Any) -> dict[str, Any]:
    return {"python": python, "environments": {REF.id: {"env": {"PYTHONPATH": folders}}}, **more}


async def described(
    python: str, folders: str, templates: LastingTemplates, ref: pb.EnvironmentRef = REF
) -> pb.EnvironmentInfo:
    """As a host that starts now has it, of workers that begin now."""
    async with serving(settings(python, folders, interact_only=True), templates) as (_, stub):
        answer = await stub.DescribeEnvironment(pb.DescribeEnvironmentRequest(environment=ref), timeout=120)
    info: pb.EnvironmentInfo = answer.environment
    return info


@pytest.fixture
async def templates() -> AsyncIterator[LastingTemplates]:
    made = LastingTemplates(300.0)
    yield made
    await made.end()


async def test_what_is_another_environment_has_another_digest(
    envs_python: str, templates: LastingTemplates, tmp_path: Path
) -> None:
    """consists.py 1-3: and what is the same one has the same, loaded elsewhere and later."""
    package = write(tmp_path / "a")
    folders = f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}"
    first = await described(envs_python, folders, templates)
    assert sorted(first.files) == [
        "moving_env/__init__.py",
        "moving_env/scoring.py",
        "moving_env/words.json",
    ]
    assert first.digest and first.examples_digest and first.version == "0.1.0"
    # Python has compiled it meanwhile; it is moved, its files are touched, running left something there.
    shutil.move(tmp_path / "a", tmp_path / "b")
    package = tmp_path / "b" / "moving_env"
    for file in package.rglob("*"):
        os.utime(file, (1e9, 1e9))
    (package / "outputs").mkdir()
    (package / "outputs" / "results.jsonl").write_text("{}\n")
    (package / "moving.log").write_text("loaded\n")
    (package / ".cache").write_text("warm")
    (tmp_path / "b" / "beside.py").write_text("UNUSED = True\n")
    turned = pb.EnvironmentRef(id="owner/moving-env", args_json='{"last": 5, "first": 0}')
    again = await described(envs_python, folders, templates, turned)
    assert (again.digest, again.files, again.examples_digest) == (
        first.digest,
        first.files,
        first.examples_digest,
    )
    (package / "scoring.py").write_text(SCORING.replace("word in said", "word == said"))
    stricter = await described(envs_python, folders, templates)
    changed = [name for name in first.files if first.files[name] != stricter.files[name]]
    assert changed == ["moving_env/scoring.py"] and stricter.digest != first.digest
    assert stricter.examples_digest == first.examples_digest
    (package / "scoring.py").write_text(SCORING)
    other_args = pb.EnvironmentRef(id=REF.id, args_json='{"first": 1}')
    fewer = await described(envs_python, folders, templates, other_args)
    assert fewer.files == first.files and fewer.train_size == 2
    assert len({fewer.examples_digest, first.examples_digest}) == 2
    assert len({fewer.digest, first.digest, stricter.digest}) == 3


@pytest.mark.asyncio(loop_scope="session")
async def test_a_worker_that_comes_back_tells_what_it_found(
    envs_python: str, templates_of_all: LastingTemplates, written: Path, path: dict[str, Any]
) -> None:
    """Beside the first rollout of a stream, and never where nothing changed (envhost_service.proto)."""
    package = write(written)
    policy = ScriptedInference()
    inference = await serve_scripted(policy)
    reach = {"inference_addresses": [inference.address]}
    folders = path["env"]["PYTHONPATH"]
    async with serving(settings(envs_python, folders, **reach), templates_of_all) as (host, stub):

        async def told() -> list[str]:
            asked = pb.RunRolloutsRequest(
                request_id=os.urandom(4).hex(), environment=REF, members=[0, 1, 2], max_retries=2
            )
            frames = [frame async for frame in stub.RunRollouts(asked, timeout=120)]
            rollouts = [frame for frame in frames if frame.HasField("rollout")]
            assert not any(frame.rollout.HasField("failure") for frame in rollouts), rollouts
            # So is who sampled it, which is one replica's address for a group that is at one.
            told_of = [list(one.sampled_by.replicas) for one in rollouts if one.HasField("sampled_by")]
            assert told_of == [[inference.address]] and rollouts[0].HasField("sampled_by")
            assert not any(frame.rollout.replicas or frame.rollout.weights for frame in rollouts)
            return [frame.environment_digest for frame in rollouts]

        asked = pb.DescribeEnvironmentRequest(environment=REF)
        before = (await stub.DescribeEnvironment(asked, timeout=120)).environment
        assert await told() == [before.digest, "", ""] == await told()
        (package / "words.json").write_text('["red", "green", "yellow"]')
        assert await told() == [before.digest, "", ""], "it is loaded as it was"
        (worker,) = [worker for pool in host._pools.values() for worker in pool.workers]
        os.kill(worker.pid, 9)
        (after, *rest) = await told()
        assert after not in ("", before.digest) and rest == ["", ""]
        now = (await stub.DescribeEnvironment(asked, timeout=120)).environment
        assert now.digest == after and now.examples_digest != before.examples_digest
    await inference.stop(0)


@pytest.fixture
def imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, dict[str, str]], dict[str, Path]]]:
    """Writes files into a folder of the path, imports a package of them, and says of which it consists."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def consists_of(package: str, files: dict[str, str]) -> dict[str, Path]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        importlib.invalidate_caches()
        importlib.import_module(package)
        return consists.files_of([package], lambda file: Path(file).is_relative_to(tmp_path))

    yield consists_of
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_single_module_is_one_file_and_what_it_imports(tmp_path: Path, imported: Any) -> None:
    """consists.py 2: never the folder around it, which may be site-packages."""
    files = {"lonely_env.py": "import lonely_judge\n", "lonely_judge.py": "", "x.py": ""}
    found = imported("lonely_env", files)
    assert found == {
        "lonely_env.py": tmp_path / "lonely_env.py",
        "lonely_judge.py": tmp_path / "lonely_judge.py",
    }


def test_of_a_wheel_count_the_files_that_it_brought(tmp_path: Path, imported: Any) -> None:
    """consists.py 2: what was written there since does not, but for what is imported of it."""
    files = {
        "wheel_env__init.txt": "",
        "wheel_env/__init__.py": "from wheel_env import patched\n",
        "wheel_env/data/words.txt": "red",
        "wheel_env/patched.py": "",
        "wheel_env/data/generated.json": "[1]",
        "wheel_env-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: wheel-env\nVersion: 1.0\n",
        "wheel_env-1.0.dist-info/RECORD": "wheel_env/__init__.py,,\nwheel_env/data/words.txt,,\n"
        "wheel_env/__pycache__/__init__.cpython-311.pyc,,\nwheel_env-1.0.dist-info/RECORD,,\n"
        "../../bin/wheel-env,,\n",
    }
    listed = ["wheel_env/__init__.py", "wheel_env/patched.py", "wheel_env/data/words.txt"]
    assert list(imported("wheel_env", files)) == listed
    (tmp_path / "wheel_env-1.0.dist-info/RECORD").unlink()
    assert list(imported("wheel_env", {})) == [*listed[:2], "wheel_env/data/generated.json", listed[2]]


def test_folders_that_are_linked_are_read_once_each(tmp_path: Path, imported: Any) -> None:
    """consists.py 2: a data set is often one; and a link may lead to where it lies."""
    (tmp_path / "shared" / "more").mkdir(parents=True)
    (tmp_path / "shared" / "more" / "words.txt").write_text("red")
    package = tmp_path / "linked_env"
    package.mkdir()
    (package / "a").symlink_to(tmp_path / "shared")
    (package / "again").symlink_to(package)
    (tmp_path / "shared" / "more" / "up").symlink_to(tmp_path / "shared")
    found = imported("linked_env", {"linked_env/__init__.py": "", "linked_env/own/x.txt": ""})
    assert list(found) == ["linked_env/__init__.py", "linked_env/a/more/words.txt", "linked_env/own/x.txt"]
    before = consists.digests(found)
    (tmp_path / "shared" / "more" / "words.txt").write_text("blue")
    assert consists.digests(found) != before


def test_a_name_that_is_no_utf_8_can_be_told(tmp_path: Path, imported: Any) -> None:
    imported("named_env", {"named_env/__init__.py": ""})
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/named_env/w\xff.txt")).write_text("red")
    info = pb.EnvironmentInfo(id="named-env", infinite=True)

    async def nothing(asked: pb.GetTasksRequest) -> pb.GetTasksResponse:
        return pb.GetTasksResponse()

    asyncio.run(consists.tell(info, {}, lambda file: Path(file).is_relative_to(tmp_path), nothing))
    assert sorted(info.files) == ["named_env/__init__.py", "named_env/w\ufffd.txt"]
    pb.EnvironmentInfo.FromString(info.SerializeToString())


def test_what_is_read_is_bounded(tmp_path: Path, imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """consists.py 4: code comes first, and of a large file both ends and the size count."""
    monkeypatch.setattr(consists, "MAX_FILES", 4)
    monkeypatch.setattr(consists, "MAX_WHOLE_BYTES", 100)
    monkeypatch.setattr(consists, "END_BYTES", 10)
    data = {f"large_env/data/{at:03}.txt": "x" for at in range(20)}
    large = tmp_path / "large_env" / "data" / "000.txt"
    code = {"large_env/__init__.py": "", "large_env/zoo.py": ""}
    found = imported("large_env", code | data | {"large_env/data/000.txt": "a" * 50 + "b" * 1000 + "c" * 50})
    assert [name.removeprefix("large_env/") for name in found] == [
        *("__init__.py", "zoo.py"),
        *("data/000.txt", "data/001.txt"),
    ]
    name = "large_env/data/000.txt"
    digest = consists.digests(found)[name]
    for content, same in (
        (b"a" * 50 + b"?" * 1000 + b"c" * 50, True),
        (b"a" * 50 + b"b" * 1000 + b"c" * 51, False),
        (b"a" * 50 + b"b" * 1000 + b"c" * 49 + b"!", False),
        (b"!" + b"a" * 49 + b"b" * 1000 + b"c" * 50, False),
    ):
        large.write_bytes(content)
        assert (consists.digests(found)[name] == digest) is same, content[:1] + content[-1:]
    large.unlink()
    assert name not in consists.digests(found)


def test_a_tree_of_folders_is_walked_so_far(
    tmp_path: Path, imported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """consists.py 4: a folder is an entry like a file."""
    deep = {"deep_env/__init__.py": "", "deep_env/" + "folder/" * 20 + "far.txt": "x"}
    assert len(imported("deep_env", deep)) == 2
    monkeypatch.setattr(consists, "MAX_WALKED", 10)
    assert list(imported("deep_env", deep)) == ["deep_env/__init__.py"]
