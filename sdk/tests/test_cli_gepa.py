"""`quartet gepa`: what a candidate is scored by, what is refused, what is written."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from quartet.cli.__main__ import build_parser, main
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.eval.kept import keep
from quartet.cli.eval.source import choose
from quartet.cli.gepa import adapter as module
from quartet.cli.gepa import command
from quartet.cli.gepa.adapter import ATTEMPTS, NO_PROMPTS, VALIDATION, Adapter, NoPrompt
from quartet.cli.gepa.artefacts import METADATA, head, write_artefacts
from quartet.cli.gepa.command import _check_columns, _initial_prompt
from quartet.cli.gepa.config import GepaConfig
from quartet.cli.gepa.policies import Prompted
from quartet.cli.gepa.teacher import teacher_of
from quartet.cli.outputs import write_json
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

    def __init__(self, answer: pb.ModelAnswer | None = None) -> None:
        self.seen: list[list[tuple[str, str]]] = []
        self.answer = answer

    async def __call__(self, question: pb.ModelQuestion) -> pb.ModelAnswer:
        self.seen.append([(one.role, one.content) for one in question.messages])
        echo = pb.ModelAnswer(message=Message(content=f"teach: {question.messages[0].content}"))
        return self.answer or echo


class World:
    """Stands for the host: says what each rollout ends as, and who was asked for."""

    def __init__(self) -> None:
        self.failing = 0
        self.breaking: int | None = None
        self.played: list[tuple[str, str, int]] = []

    async def play(self, host: Any, trial: Any, wanted: Any, tasks: Any, note: Any, policy: Prompted) -> None:
        for task in tasks:
            if self.breaking == 0:
                self.breaking = None
                raise QuartetError("NOT_READY", "gone")
            if self.breaking is not None:
                self.breaking -= 1
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


def adapter(folder: Path, teacher: Teacher | None = None, said: list[str] | None = None) -> Adapter:
    (trial,) = validate(EvalFileConfig, {"rollouts_per_example": 1, "eval": [{"id": "e"}]}).trials
    board: Any = SimpleNamespace(say=[].append if said is None else said.append)
    loop, teacher = asyncio.get_running_loop(), teacher or Teacher()
    return Adapter(
        loop, None, trial, TASKS, Prompted(Teacher()), teacher, "'t' at url", ["m"], 9, board, folder
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
    with pytest.raises(QuartetError, match="TimeoutError: no answer"):
        await asyncio.to_thread(one.reflect, "the library asks again")
    one.broken = None
    with pytest.raises(QuartetError):
        await asyncio.to_thread(one.reflect, "mend it")
    assert str(one.broken) == "OVERLOADED: the teacher 't' at url: later"
    one.broken = None

    async def unknown(*arguments: Any) -> str:
        raise ConfigError("the endpoint url refuses: 404")

    monkeypatch.setattr(module, "ask", unknown)
    with pytest.raises(ConfigError):
        await asyncio.to_thread(one.reflect, "mend it")
    assert str(one.broken) == "the teacher 't' at url: the endpoint url refuses: 404"
    world.failing = 10 * ATTEMPTS
    with pytest.raises(QuartetError):
        await asyncio.to_thread(one.evaluate, [("train", 1)], {"system_prompt": "four"})
    assert "teacher" not in str(one.broken), "it is not asked there"


@pytest.mark.parametrize(
    ("text", "truncated", "why"),
    [
        ("", False, "has no prompt in it; name another reflection_model"),
        ("```\n\n```", False, "has no prompt in it"),
        ("", True, "was cut at 9 tokens, before it said anything; raise reflection_max_tokens"),
        ("```\nhalf a pro", True, "was cut at 9 tokens, before the end of its prompt; raise"),
        ("```\nwhole\n```\nand so o", True, ""),
        ("without a fence", False, ""),
    ],
)
async def test_an_answer_without_a_whole_prompt_is_none(
    world: World, tmp_path: Path, text: str, truncated: bool, why: str
) -> None:
    """adapter.py 4: rollouts would be spent on an empty prompt, which may even win."""
    teacher, said = Teacher(pb.ModelAnswer(message=Message(content=text), truncated=truncated)), []
    one = adapter(tmp_path, teacher, said)
    for _ in range(NO_PROMPTS - 1):
        if not why:
            assert await asyncio.to_thread(one.reflect, "mend it") == text
            continue
        with pytest.raises(NoPrompt):
            await asyncio.to_thread(one.reflect, "mend it")
        assert why in said[-1] and one.broken is None
    if why:
        with pytest.raises(QuartetError, match="the teacher 't' at url: 10 answers in a row"):
            await asyncio.to_thread(one.reflect, "mend it")
        assert one.broken is not None and why in str(one.broken)


async def test_candidates_have_one_number_in_lines_and_files(world: World, tmp_path: Path) -> None:
    """adapter.py 5."""
    said: list[str] = []
    one = adapter(tmp_path, said=said)

    async def play(prompt: str, *batch: tuple[str, int]) -> None:
        await asyncio.to_thread(one.evaluate, list(batch), {"system_prompt": prompt})

    await play("first", ("eval", 0))
    kept = [{"system_prompt": "first"}, {"system_prompt": "second"}]  # also those of before a resume
    step: Any = {"iteration": 9, "state": SimpleNamespace(program_candidates=kept)}
    one.on_iteration_start(step)
    await play("second", ("train", 0), ("train", 1))
    await play("rejected", ("train", 0))
    await play("third", ("eval", 0))
    assert [line.partition(":")[0] for line in said] == [
        "candidate 0", "candidate 1", "a new prompt", "candidate 2"
    ]  # fmt: skip


async def test_a_validation_that_breaks_off_keeps_what_had_ended(world: World, tmp_path: Path) -> None:
    """adapter.py 3."""
    examples = [Task(index=index, data_json="{}") for index in range(2)]
    one = adapter(tmp_path)
    one._tasks = {**TASKS, "eval": examples}
    world.breaking = 1
    with pytest.raises(QuartetError, match="gone"):
        await asyncio.to_thread(one.evaluate, [("eval", 0), ("eval", 1)], {"system_prompt": "four"})
    again = adapter(tmp_path)
    again._tasks = one._tasks
    await asyncio.to_thread(again.evaluate, [("eval", 0), ("eval", 1)], {"system_prompt": "four"})
    assert world.played == [("four", "eval", 0), ("four", "eval", 1)]


async def test_a_long_batch_says_how_far_it_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adapter.py 6: at most one line every so many seconds."""
    said: list[str] = []
    one = adapter(tmp_path, said=said)
    one._tasks = {**TASKS, "eval": [Task(index=index, data_json="{}") for index in range(6)]}
    times = iter(range(0, 1000, 4))  # a rollout takes four seconds or more
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    world.failing = 1
    await asyncio.to_thread(one.evaluate, [("eval", at) for at in range(6)], {"system_prompt": "four"})
    assert said == [
        "candidate 0: 2 of 6 rollouts ended; 1 failed, which are tried again",
        "candidate 0: 5 of 6 rollouts ended; 1 failed, which are tried again",
        "candidate 0: reward 4.000 on 6 eval examples",
    ]


def test_where_nothing_better_was_found_no_line_for_a_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "write_artefacts", lambda *_: {"system_prompt": "p"})
    config = GepaConfig(model="m", max_calls=4)
    plan: Any = SimpleNamespace(folder=tmp_path, env=None, settings={}, config=config, again="again")
    result = SimpleNamespace(
        val_aggregate_scores=[0.5, 0.5], val_subscores=[{0: 0.5}], total_metric_calls=9, best_idx=0
    )
    assert command._report(plan, result, "v1") == 0
    said = capsys.readouterr().out
    assert "2 candidates kept" in said and "no prompt earned more than candidate 0" in said
    assert "args =" not in said
    result.total_metric_calls = 1
    command._report(plan, result, "v1")
    said = capsys.readouterr().out
    assert "no other prompt was tried: candidate 0 took all of max_calls = 4" in said and "args =" not in said
    assert "go on with a larger one: again -B MORE" in said
    result.total_metric_calls = 9
    result.best_idx = 1
    command._report(plan, result, "v1")
    said = capsys.readouterr().out
    assert "the best is candidate 1: " in said and 'args = { system_prompt = "p" }' in said


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_refused_before_it_began_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], begun: bool
) -> None:
    folder = tmp_path / "gepa" / "e--h--1" / "one"

    def deploy(source: Any, services: Path, *settings: Any) -> list[Any]:
        services.mkdir()
        return []

    def refuses(specs: Any, source: Any, work: Any) -> None:
        assert (folder / "services").is_dir()
        if begun:
            (folder / "metadata.json").write_text("{}")
            (folder / VALIDATION).touch()
        raise ConfigError("state_columns: a rollout has no 'exact_mach'")

    monkeypatch.setattr(command, "deploy", deploy)
    monkeypatch.setattr(command, "with_host", refuses)
    asked = ["gepa", "e", "--inference-addresses", '["h:1"]', "-o", str(tmp_path), "--run-id", "one"]
    assert main(asked) == 2
    assert folder.parent.is_dir() and folder.exists() is begun
    assert (f"go on with quartet gepa --resume one -o {tmp_path}" in capsys.readouterr().err) is begun
    monkeypatch.setattr(command, "deploy", Mock(side_effect=ConfigError("no package 'e'")))
    assert main([*asked[:-1], "two"]) == 2
    assert not folder.with_name("two").exists(), "nor where there is no such environment"


def test_a_resumed_optimisation_need_not_be_told_what_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """command.py 2, by eval/kept.py: one of flags, one of a file, of which the last is taken where none is
    named, and one that was refused before it began, which is not."""
    ends: BaseException = KeyboardInterrupt()

    def hosted(specs: Any, source: Any, work: Any) -> None:
        if not isinstance(ends, ConfigError):
            plan = command.plan_of(*asked("--resume", name))
            write_json(plan.folder / METADATA, head(plan.settings))
        raise ends

    def asked(*arguments: str) -> tuple[GepaConfig, Any]:
        options, rest = build_parser().parse_known_args(["gepa", *arguments, "-o", str(tmp_path)])
        return command.read(options, rest), options

    monkeypatch.setattr(command, "deploy", lambda *given: [])
    monkeypatch.setattr(command, "with_host", hosted)
    (file := tmp_path / "gepa.toml").write_text(
        'inference_addresses = ["h:2"]\nmax_calls = 7\n[env]\nid = "f"\nargs = { key = "sk-1", n = 1.0 }\n'
    )
    flags = ["e", "--inference-addresses", '["h:1"]', "-a", '{"k": [1, 2]}', "-N", "4", "-T", "0.5"]
    columns = ["--state-columns", "num_turns", "prompt"]
    for name, given in (("first", [*flags, *columns]), ("second", ["@", str(file)])):
        assert main(["gepa", *given, "-o", str(tmp_path), "--run-id", name]) == 130
        assert f"go on with quartet gepa --resume {name} -o {tmp_path}" in capsys.readouterr().err
    (kept,) = (tmp_path / "gepa").glob("*/second/asked.json")
    assert kept.stat().st_mode & 0o077 == 0, "an environment's arguments may hold a judge's key"

    config, options = asked("--resume", "first")
    assert config.env == HostedConfig(id="e", args={"k": [1, 2]}) and not capsys.readouterr().err
    assert (config.num_val, config.sampling.temperature) == (4, 0.5)
    assert (config.state_columns, config.inference_addresses) == (("num_turns", "prompt"), ("h:1",))
    assert command.plan_of(config, options).run_id == "first"
    assert asked("--resume", "first", "-B", "9")[0].max_calls == 9, "what is said now wins"
    slow = asked("--resume", "first", "--env.timeout-seconds", "1800.0")[0].env
    assert slow == HostedConfig(id="e", args={"k": [1, 2]}, timeout_seconds=1800.0)
    for other, said in (
        (
            ["-T", "1.0"],
            'sampling = {"temperature": 1.0} is refused: .* sampling = {"temperature": 0.5}; set',
        ),
        (["--env.args", "{k = 3}"], r'env\.args = {"k": 3} is refused: .* env\.args = {"k": '),
        (
            ["--inference-addresses", '["h:3"]', "--model", "h:1"],
            r'inference_addresses = \["h:3"\] is refused',
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            command.plan_of(*asked("--resume", "first", *other))
    ends, name = ConfigError("the environment is not there"), "third"
    assert main(["gepa", *flags, "-o", str(tmp_path), "--run-id", name]) == 2
    config, options = asked("--resume")
    assert config.env == HostedConfig(id="f", args={"key": "sk-1", "n": 1.0}) and config.max_calls == 7
    assert command.plan_of(config, options).run_id == "second"
    assert capsys.readouterr().err.endswith("\n--resume: the last one is second of f--h--2\n")
    assert command.plan_of(*asked(*flags, *columns, "--resume")).run_id == "first", "of these"
    with pytest.raises(ConfigError, match="has no optimisation third that goes on without being told its"):
        asked("--resume", "third")
    (lost := tmp_path / "gepa" / "e--h--1" / "lost").mkdir()
    (lost / "asked.json").write_text("{}")
    with pytest.raises(ConfigError, match="no environment is named"):
        asked("--resume", "lost")
    (lost / "asked.json").unlink()
    # One that was killed before its environment had loaded, and then refused.
    (killed := tmp_path / "gepa" / "e--h--1" / "fourth").mkdir()
    keep(killed, asked("--resume", "first")[0])
    assert command.plan_of(*asked("--resume")).run_id == "fourth"
    assert main(["gepa", "--resume", "-o", str(tmp_path)]) == 2
    assert command.plan_of(*asked("--resume")).run_id == "second"
    assert command.plan_of(*asked("--resume", "fourth")).run_id == "fourth"


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
    env = HostedConfig(id="e", args={"k": 1}, timeout_seconds=1800.0)
    assert write_artefacts(tmp_path, result, env, "classic", settings) == {
        "k": 1,
        "system_prompt": 'b "quoted"\n',
    }
    args = write_artefacts(tmp_path, result, env, "v1", settings)
    assert args == {"k": 1, "system_prompt": str(tmp_path / "best_prompt.txt")}
    assert (tmp_path / "best_prompt.txt").read_text() == 'b "quoted"\n'
    (table,) = tomllib.loads((tmp_path / "best_env.toml").read_text())["env"]
    assert table == {"id": "e", "args": args, "timeout_seconds": 1800.0}, "the environment, as it was played"
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
        (["gepa", "e", "-m", model, "-M", model + "/"], "/' is no endpoint of configs/endpoints.toml"),
        (["gepa", "e", "-m", model, "-M", "nowhere"], "name one, or serve the model (quartet_inference"),
        (
            ["gepa", "e", "-m", model, "--reflection-base-url", "http://127.0.0.1:9/v1"],
            "set reflection_model",
        ),
        (
            ["gepa", "e", "-m", model, "-M", "x", "--reflection-base-url", "127.0.0.1:9"],
            "the teacher: base_url = '127.0.0.1:9' is refused",
        ),
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
        teacher = teacher_of(given, choose(given, ()))
        assert teacher is not None and teacher.endpoint is not None
        return [(one.url, one.model) for one in teacher.endpoint.replicas]

    assert taught(reflection_model="large") == [(near, "large")]
    assert taught(reflection_model="far") == [("http://127.0.0.1:9/v1", "distant")]
    elsewhere = "http://127.0.0.1:7/v1"
    assert taught(reflection_model="large", reflection_base_url=elsewhere) == [(elsewhere, "large")]
