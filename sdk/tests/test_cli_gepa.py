"""`quartet gepa`: what a candidate is scored by, what is refused, what is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quartet.cli.__main__ import main
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.eval.source import choose
from quartet.cli.gepa import adapter as module
from quartet.cli.gepa import command
from quartet.cli.gepa.adapter import ATTEMPTS, Adapter
from quartet.cli.gepa.artefacts import write_artefacts
from quartet.cli.gepa.command import _check_columns, _initial_prompt, _teacher
from quartet.cli.gepa.config import GepaConfig
from quartet.cli.gepa.policies import Prompted
from quartet.config import ConfigError, validate
from quartet.errors import QuartetError
from quartet.run.hosted import HostedConfig
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1.common_pb2 import Message
from quartet.v1.rollout_pb2 import FAILURE_KIND_SCORER, Rollout, RolloutFailure, Task

TASKS = {
    "train": [Task(index=index, data_json="{}") for index in range(3)],
    "eval": [Task(index=0, data_json="{}")],
}


class Teacher:
    """Says what it was asked."""

    fatal: ConfigError | None = None

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, str]]] = []

    async def __call__(self, question: pb.ModelQuestion) -> pb.ModelAnswer:
        self.seen.append([(one.role, one.content) for one in question.messages])
        return pb.ModelAnswer(message=Message(content=f"teach: {question.messages[0].content}"))


class World:
    """Stands for the host: says what each rollout ends as, and who was asked for."""

    def __init__(self) -> None:
        self.failing = 0
        self.played: list[tuple[str, str, int]] = []

    async def play(self, host: Any, trial: Any, wanted: Any, tasks: Any, note: Any, policy: Prompted) -> None:
        for task in tasks:
            self.played.append((policy.prompt, trial.split, task.index))
            rollout = Rollout(reward=float(len(policy.prompt)))
            if self.failing:
                self.failing -= 1
                rollout.failure.CopyFrom(RolloutFailure(kind=FAILURE_KIND_SCORER, message="KeyError"))
            note(task, rollout)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    one = World()
    monkeypatch.setattr(module, "play", one.play)
    yield one


def adapter(folder: Path) -> Adapter:
    (trial,) = validate(EvalFileConfig, {"rollouts_per_example": 1, "eval": [{"id": "e"}]}).trials
    board: Any = SimpleNamespace(say=lambda line: None)
    loop = asyncio.get_running_loop()
    return Adapter(
        loop, None, trial, TASKS, Prompted(Teacher()), Teacher(), "'t' at url", ["m"], 9, board, folder
    )


async def test_invariant_5_a_prompt_is_scored_by_results_and_never_by_failures(
    world: World, tmp_path: Path
) -> None:
    one = adapter(tmp_path)
    world.failing = 2
    batch = await asyncio.to_thread(
        one.evaluate, [("train", 0), ("train", 2), ("train", 0)], {"system_prompt": "four"}
    )
    assert batch.scores == [4.0, 4.0, 4.0] and one.broken is None
    world.failing = 10 * ATTEMPTS
    with pytest.raises(QuartetError, match="went on failing, the first as SCORER: KeyError"):
        await asyncio.to_thread(one.evaluate, [("train", 1)], {"system_prompt": "four"})
    assert isinstance(one.broken, QuartetError), "whatever the library makes of it"


async def test_a_prompt_is_played_once_on_a_validation_example_also_over_a_resume(
    world: World, tmp_path: Path
) -> None:
    for _ in range(2):
        one = adapter(tmp_path)
        batch = await asyncio.to_thread(one.evaluate, [("eval", 0)], {"system_prompt": "four"})
        assert batch.scores == [4.0]
    assert world.played == [("four", "eval", 0)]
    await asyncio.to_thread(one.evaluate, [("eval", 0)], {"system_prompt": "other"})
    assert len(world.played) == 2


async def test_the_teacher_answers_the_library_and_one_that_breaks_ends_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapter(tmp_path)
    assert await asyncio.to_thread(one.reflect, "mend it") == "teach: mend it"

    async def breaks(*arguments: Any) -> str:
        raise TimeoutError("no answer")

    monkeypatch.setattr(module, "ask", breaks)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(one.reflect, "mend it")
    assert str(one.broken) == "INTERNAL: the teacher 't' at url: TimeoutError: no answer"

    async def refuses(*arguments: Any) -> str:
        raise QuartetError("OVERLOADED", "later", retry_after_ms=9)

    monkeypatch.setattr(module, "ask", refuses)
    with pytest.raises(QuartetError):
        await asyncio.to_thread(one.reflect, "mend it")
    assert str(one.broken) == "OVERLOADED: the teacher 't' at url: later"
    world.failing = 10 * ATTEMPTS
    with pytest.raises(QuartetError):
        await asyncio.to_thread(one.evaluate, [("train", 1)], {"system_prompt": "four"})
    assert "teacher" not in str(one.broken), "it is not asked there"


@pytest.mark.parametrize("begun", [False, True])
def test_what_the_environment_refuses_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    folder = tmp_path / "gepa" / "e--h--1" / "one"

    def deploy(source: Any, services: Path, *settings: Any) -> list[Any]:
        services.mkdir()
        return []

    def refuses(specs: Any, source: Any, work: Any) -> None:
        assert (folder / "services").is_dir()
        if begun:
            (folder / "metadata.json").write_text("{}")
        raise ConfigError("state_columns: a rollout has no 'exact_mach'")

    monkeypatch.setattr(command, "deploy", deploy)
    monkeypatch.setattr(command, "with_host", refuses)
    asked = ["gepa", "e", "--inference-addresses", '["h:1"]', "-o", str(tmp_path), "--run-id", "one"]
    assert main(asked) == 2
    assert folder.parent.is_dir() and folder.exists() is begun


async def test_a_candidates_prompt_stands_in_place_of_the_system_message() -> None:
    inner = Teacher()
    told = Prompted(inner)
    told.prompt = "new"
    user = Message(role="user", content="q")
    await told(pb.ModelQuestion(messages=[Message(role="system", content="old"), user]))
    await told(pb.ModelQuestion(messages=[user]))
    assert inner.seen == [[("system", "new"), ("user", "q")]] * 2


def test_the_prompt_to_begin_with_is_the_environments_own_or_a_files(tmp_path: Path) -> None:
    config = GepaConfig(model="m")
    assert _initial_prompt(config, {"system_prompt": "v1"}) == "v1"
    assert _initial_prompt(config, {"prompt": [{"role": "system", "content": "classic"}]}) == "classic"
    with pytest.raises(ConfigError, match="no system prompt to begin with; give one with --initial-prompt"):
        _initial_prompt(config, {"prompt": "just a text"})
    file = tmp_path / "prompt.txt"
    file.write_text("mine")
    assert _initial_prompt(GepaConfig(model="m", initial_prompt=file), {"system_prompt": "v1"}) == "mine"
    with pytest.raises(ConfigError, match="did you mean 'exact_match'"):
        _check_columns(["exact_mtch"], ["exact_match", "answer"])


def test_the_files_name_the_best_prompt_and_the_line_that_uses_it(tmp_path: Path) -> None:
    result = SimpleNamespace(
        candidates=[{"system_prompt": "a"}, {"system_prompt": 'b "quoted"\n'}],
        parents=[[None], [0]],
        val_aggregate_scores=[0.25, 0.75],
        val_subscores=[{0: 0.5, 1: 0.0}, {0: 0.5, 1: 1.0}],
        per_val_instance_best_candidates={0: {0, 1}, 1: {1}},
        discovery_eval_counts=[2, 7],
        total_metric_calls=9,
        best_idx=1,
    )
    settings = {"env_id": "e", "model": "m", "reflection_model": "m"}
    env = HostedConfig(id="e", args={"k": 1})
    assert write_artefacts(tmp_path, result, env, "classic", settings) == {
        "k": 1,
        "system_prompt": 'b "quoted"\n',
    }
    args = write_artefacts(tmp_path, result, env, "v1", settings)
    assert args == {"k": 1, "system_prompt": str(tmp_path / "best_prompt.txt")}
    assert (tmp_path / "best_prompt.txt").read_text() == 'b "quoted"\n'
    frontier = [json.loads(line) for line in (tmp_path / "pareto_frontier.jsonl").read_text().splitlines()]
    assert [row["num_best_candidates"] for row in frontier] == [2, 1]
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    for file in ("metadata.json", "best_env.toml"):
        assert (tmp_path / file).stat().st_mode & 0o077 == 0, "outputs.py 3"
    assert (metadata["best_score"], metadata["total_metric_calls"]) == (0.75, 9)


def test_bad_input_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "w.safetensors"):
        (tmp_path / "model" / name).touch()
    model = str(tmp_path / "model")
    for arguments, said in (
        (["gepa"], "no environment is named; write quartet gepa ENVIRONMENT"),
        (["gepa", "e"], "no model is named"),
        (["gepa", "e", "-m", model, "-M", model + "/"], "is a model folder; serve it"),
        (["gepa", "e", "-m", model, "-B", "0"], "max_calls = 0 is refused"),
        (["gepa", "e", "-m", model, "--max-metric-calls", "9"], "did you mean"),
        (
            ["gepa", "e", "-m", model, "--resume", "x", "-o", str(tmp_path)],
            "--resume x: there is no optimisation",
        ),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err, arguments


def test_a_teacher_that_is_not_in_the_file_is_another_model_of_the_endpoint(tmp_path: Path) -> None:
    """As -m A -M B is understood by Verifiers' own command; one in the file, or with an address, is not."""
    file = tmp_path / "endpoints.toml"
    file.write_text("[[endpoint]]\nendpoint_id = 'far'\nmodel = 'distant'\nurl = 'http://127.0.0.1:9/v1'\n")
    near = "http://127.0.0.1:8/v1"

    def taught(**config: str) -> list[tuple[str, str]]:
        given = GepaConfig(model="small", base_url=near, endpoints=file, **config)
        teacher = _teacher(given, choose(given))
        assert teacher is not None and teacher.endpoint is not None
        return [(one.url, one.model) for one in teacher.endpoint.replicas]

    assert taught(reflection_model="large") == [(near, "large")]
    assert taught(reflection_model="far") == [("http://127.0.0.1:9/v1", "distant")]
    elsewhere = "http://127.0.0.1:7/v1"
    assert taught(reflection_model="large", reflection_base_url=elsewhere) == [(elsewhere, "large")]
