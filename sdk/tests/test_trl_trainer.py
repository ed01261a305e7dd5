"""GRPOTrainer of quartet.trl without services: what it refuses, where it serves, what it tells of its run."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy
import pytest
from planned_runs import accepted
from quartet.cli.rl import prepared
from quartet.cli.sft.template import Template
from quartet.grpo.background import Background
from quartet.grpo.lines import Lines
from quartet.rewards.functions import Failed, Group
from quartet.rewards.serving import served
from quartet.scripts.models import get_model, get_tokenizer
from quartet.trl import ConfigError, GRPOConfig, GRPOTrainer, LoraConfig, address
from quartet.v1 import common_pb2
from quartet.v1 import reward_service_pb2 as pb
from quartet.v1 import reward_service_pb2_grpc as rpc

HEAVY = ("torch", "transformers", "grpc", "numpy", "matplotlib", "rich", "datasets", "tokenizers", "trl")
ROWS = [{"prompt": f"text {number}", "answer": number} for number in range(20)]
CHATS = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(3)]


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def other(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def shout(text: str) -> str:
    """Says it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


@pytest.fixture
def args(tmp_path: Path) -> GRPOConfig:
    return GRPOConfig(str(tmp_path / "run"), max_steps=10, logging_steps=2)


class Silent:
    def reset(self, **_: Any) -> None: ...


class Broken(Silent):
    def __init__(self) -> None:
        raise KeyError("x")


class Later(Silent):
    async def reset(self, **_: Any) -> None: ...  # type: ignore[override]


class Vague(Silent):
    def push(self, how) -> str:  # type: ignore[no-untyped-def]
        return ""


class Door(Silent):
    def push(self) -> str:
        """Pushes it."""
        return "open"


def push() -> str:
    """Pushes something else."""
    return ""


@pytest.fixture
def make(chat_model: Path, args: GRPOConfig) -> Any:
    def made(**given: Any) -> GRPOTrainer:
        usual = {"model": str(chat_model), "reward_funcs": length, "args": args, "train_dataset": ROWS}
        return GRPOTrainer(**{**usual, **given})

    return made


def test_the_output_folder_stays_where_it_is_wherever_a_function_goes(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make(args=GRPOConfig("run", max_steps=1))
    monkeypatch.chdir("/")
    assert trainer.folder == tmp_path / "run"


def test_importing_it_imports_nothing_heavy() -> None:
    program = f"import sys, quartet.trl; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_making_one_needs_neither_torch_nor_trl(chat_model: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom quartet.trl import GRPOConfig, GRPOTrainer\n"
        f"made = GRPOTrainer({str(chat_model)!r}, lambda completions, **_: [0.0], "
        f"GRPOConfig({str(tmp_path / 'o')!r}), [{{'prompt': 'a'}}] * 8)\nmade.state\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"reward_funcs": None}, "reward_funcs is missing: give a function"),
        ({"reward_funcs": []}, "reward_funcs is missing: give a function"),
        ({"reward_funcs": lambda completions: [0.0]}, "cannot be called with prompts, completions, "),
        ({"reward_funcs": "org/model"}, "reward_funcs = 'org/model' is refused: load that reward model"),
        ({"train_dataset": None}, 'train_dataset is missing: give a list of rows with a column "prompt"'),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": [{"text": "a"}]}, "prompt"),
        ({"train_dataset": iter(ROWS)}, "train_dataset"),
        ({"eval_dataset": {"easy": ROWS}}, "eval_dataset"),
        ({"model": "no/model"}, "model = 'no/model' is neither a folder here nor a model in the"),
        ({"model": 3}, "model = int is refused: the services load the model themselves; give its folder"),
        ({"processing_class": 3}, "processing_class = int is refused"),
        ({"args": {"beta": 0}}, "args = dict is refused: give GRPOConfig of quartet.trl"),
        ({"callbacks": [print]}, "callbacks[0] = <built-in function print> is refused: give an object with"),
        ({"optimizers": (print, None)}, "(optimizers=...): there is no such argument; the trainer makes"),
        ({"tools": [print]}, "tools[0] = print is refused: "),
        ({"tools": numpy.array([shout, print])}, "tools = ndarray is refused: give a list of functions"),
        ({"reward_funcs": numpy.array([shout, print])}, "reward_funcs = ndarray is refused: give a function"),
        ({"tools": [shout]}, 'train_dataset[0]["prompt"] is text, and tools are shown by a chat template'),
        ({"rollout_func": print}, "'quartet env init NAME --kind tool' writes one"),
        ({"environment_factory": 3}, "environment_factory = int is refused: give a class, or a function"),
        ({"environment_factory": {"a": Door}}, "environment_factory = dict is refused: there is one of them"),
        ({"environment_factory": object}, "environment_factory: object has no method reset; give a class"),
        ({"environment_factory": Broken}, "class Broken is refused: looked at, it raises KeyError: 'x'"),
        ({"environment_factory": Later}, "reset of Later is async, and TRL does not wait for it"),
        ({"environment_factory": Vague}, "method push = push"),
        ({"environment_factory": Door, "tools": [push]}, "method push is the second tool called 'push'"),
        ({"environment_factory": Door}, 'train_dataset[0]["prompt"] is text, and tools are shown by a chat'),
        ({"environment_factory": Silent}, "is text, and what reset() returns is appended to a message"),
        ({"environment_factory": Silent, "reward_funcs": None}, "reward_funcs is missing: give a function"),
        ({"quantization_config": 3}, "weights are trained as they are in the model's folder"),
        ({"reward_processing_classes": [None, None]}, "reward_processing_classes has 2 for 1 reward func"),
        ({"tokenizer": 3}, "it is called processing_class now"),
        ({"reward_fucns": print}, "did you mean 'reward_funcs'?"),
        ({"peft_config": 3}, "peft_config = 3 is no LoraConfig"),
    ],
)
def test_what_a_trainer_refuses(make: Any, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**given)
    assert sentence in str(refused.value)


def test_what_scripts_say_without_meaning_anything_is_taken(make: Any) -> None:
    made = make(callbacks=[], tools=None, optimizers=(None, None), peft_config=LoraConfig(r=2))
    assert made.translated().config.lora.r == 2
    assert make(train_dataset=CHATS).translated().config.max_steps == 10
    with pytest.raises(AttributeError, match=r"GRPOTrainer has no 'compute_loss' here: the training loop"):
        _ = made.compute_loss


def test_a_model_whose_template_shows_no_calls_has_no_tools(make: Any, chat_model: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        patch.setattr("quartet.cli.sft.template.template_of", lambda _: Template(template, {}))
        with pytest.raises(ConfigError, match=f"the chat template of the model in {chat_model} does not"):
            make(train_dataset=CHATS, tools=[shout])
    assert make(train_dataset=CHATS, tools=[shout]).tools == [shout]
    assert make(train_dataset=CHATS, tools=[]).tools == make(train_dataset=CHATS).tools == []


def test_tools_are_served_within_the_limits_of_the_arguments(make: Any, args: GRPOConfig) -> None:
    args.max_completion_length, args.max_tool_calling_iterations = 10, 1
    threads: list[int] = []

    def noted(text: str) -> str:
        """Says it loudly.

        Args:
            text: What to say.
        """
        threads.append(threading.get_ident())
        return text.upper()

    made = make(train_dataset=CHATS, eval_dataset=CHATS, tools=[noted])
    assert made.translated().notes == ()
    run, background = made.translated(), Background[Any]()
    call = common_pb2.ToolCall(id="c", name="noted", arguments_json='{"text": "abc"}')
    calling = common_pb2.Message(role="assistant", tool_calls=[call])

    def work() -> Any:
        with grpc.insecure_channel(run.config.env[0].args["address"]) as channel:
            stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            said = stub.DescribeRewards(pb.DescribeRewardsRequest(), timeout=60)
            (prompt,) = stub.GetPrompts(pb.GetPromptsRequest(count=1), timeout=60).prompts
            asked = [[calling], [calling, common_pb2.Message(role="tool", content="ABC"), calling]]
            found = [
                stub.Continue(pb.ContinueRequest(messages=one, token_count=3), timeout=60) for one in asked
            ]
            return said.max_turns, [tool.name for tool in prompt.tools], found

    with made.beside(run, background.end):
        turns, shown, found = background.run(work, lambda ended: made.wait(ended, lambda: None))
    assert (turns, shown) == (2, ["noted"]) and threads == [threading.get_ident()]
    assert [[one.content for one in more.messages] for more in found] == [["ABC"], []]
    assert found[0].max_tokens == 4


def test_weights_are_of_the_functions(make: Any, args: GRPOConfig) -> None:
    args.reward_weights = [1.0]
    with pytest.raises(ConfigError, match="reward_weights has 1 numbers for 2 reward functions"):
        make(reward_funcs=[length, other])


def test_without_arguments_they_are_trls(chat_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for model in (str(chat_model), get_model(f"{chat_model}/")):
        made = GRPOTrainer(model, length, train_dataset=ROWS)
        assert made.folder == tmp_path / f"{chat_model.name}-GRPO"
        assert (made.state.max_steps, made.state.global_step, made.state.epoch) == (60, 0, 0.0)


def test_a_tokenizer_is_the_models_own(make: Any, chat_model: Path) -> None:
    template = (chat_model / "chat_template.jinja").read_text()
    make(processing_class=get_tokenizer(str(chat_model)))
    make(processing_class=SimpleNamespace(name_or_path=str(chat_model), chat_template=template))
    make(processing_class=SimpleNamespace(name_or_path=str(chat_model)))
    with pytest.raises(ConfigError, match="processing_class has another chat template than its folder"):
        make(
            processing_class=SimpleNamespace(name_or_path=str(chat_model), chat_template=template + "{{ x }}")
        )


def test_settings_of_the_template_are_the_prompts_and_the_runs(make: Any, args: GRPOConfig) -> None:
    args.chat_template_kwargs = {"enable_thinking": False}
    made = make(train_dataset=CHATS)
    assert made.translated().config.sampling.template_settings == {"enable_thinking": False}
    (prompt,) = made._train.page(0, 1)
    assert json.loads(prompt.template_settings) == {"enable_thinking": False}
    for wrong, sentence in (({"x": print}, "is refused"), ({"tools": []}, "tools")):
        args.chat_template_kwargs = wrong
        with pytest.raises(ConfigError, match=rf"chat_template_kwargs.*{sentence}"):
            make(train_dataset=CHATS)


def test_an_address_is_short_and_nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """address.py 1, 2: whatever TMPDIR is, where there is the folder that every Unix has."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    found = {address.fresh() for _ in range(100)}
    assert len(found) == 100
    assert all(one.startswith("unix:/tmp/quartet-rewards-") and len(one) < 100 for one in found)
    monkeypatch.setattr(address, "EVERYWHERE", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert address.fresh().startswith(f"unix:{tmp_path}/quartet-rewards-")


def test_a_run_that_goes_on_is_served_where_it_began(make: Any, args: GRPOConfig, tmp_path: Path) -> None:
    """address.py 1: also from another process, and where its folder was moved."""
    first = make()
    at = first.translated().config.env[0].args["address"]
    assert at != make().translated().config.env[0].args["address"], "there is no run yet"
    with accepted(prepared(first.translated().config, first.folder, None, resume=False, overwrite=False)):
        pass
    assert make().translated().config.env[0].args["address"] == at
    (tmp_path / "run").rename(tmp_path / "moved")
    assert make().translated().config.env[0].args["address"] != at
    args.output_dir = str(tmp_path / "moved")
    moved = make().translated().config
    assert moved.env[0].args["address"] == at
    assert prepared(moved, tmp_path / "moved", None, resume=True, overwrite=False).resumed


@pytest.mark.parametrize(
    "env",
    [
        '[[env]]\nid = "reverse-text"',
        '[[env]]\nid = "reward-service"\nargs = { address = "127.0.0.1:50060" }',
        "",
        "[",
    ],
)
def test_a_run_of_something_else_lends_no_address(tmp_path: Path, env: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "config_toml": f'model = "m"\n{env}\n'}))
    assert address.of_run(tmp_path) is None
    (tmp_path / "run.json").write_text("{")
    assert address.of_run(tmp_path) is None and address.of_run(tmp_path / "none") is None


def test_what_is_served_is_there_while_the_services_are_and_gone_after(make: Any) -> None:
    made = make(eval_dataset=CHATS)
    run = made.translated()
    at = run.config.env[0].args["address"]
    folder = Path(at.removeprefix("unix:")).parent
    with made.beside(run, lambda _: None), grpc.insecure_channel(at) as channel:
        stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
        said = stub.DescribeRewards(pb.DescribeRewardsRequest(), timeout=60)
        assert (said.train_size, said.eval_size) == (20, 3)
        assert [(one.name, one.weight) for one in said.functions] == [("length", 1.0)]
        # A folder in which somebody serves stays.
        address.remove(at)
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_evaluation_inside_a_function_is_refused(make: Any, is_async: bool) -> None:
    """It would wait for the function, which waits for it."""
    found: list[str] = []

    def measures(completions: list[str], **_: Any) -> list[float]:
        with pytest.raises(ConfigError) as refused:
            made.evaluate()
        found.append(str(refused.value))
        return length(completions)

    async def measures_beside(completions: list[str], **_: Any) -> list[float]:
        return measures(completions)

    made = make(reward_funcs=measures_beside if is_async else measures, eval_dataset=CHATS)
    group = Group(["p"], ["c"], [[1]], {"answer": ["a"]})
    assert not isinstance(asyncio.run(made._functions.score(group)), Failed), "it is called well"
    assert len(found) == 1 and "inside a reward function or a tool" in found[0]


def test_a_function_that_goes_on_behind_the_end_is_told_of(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.trl.trainer.LATE_SECONDS", 0.05)
    began, release, told = threading.Event(), threading.Event(), list[str]()

    class Told(logging.Handler):
        """The function goes on until it is told of."""

        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            release.set()

    def slow(completions: list[str], **_: Any) -> list[float]:
        began.set()
        assert release.wait(60)
        return length(completions)

    made, handler = make(reward_funcs=slow), Told(logging.WARNING)
    run = made.translated()
    background: Background[bool] = Background()
    at = run.config.env[0].args["address"]
    made.logger.addHandler(handler)
    try:
        with made.beside(run, background.end), grpc.insecure_channel(at) as channel:
            stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            asked = pb.ScoreGroupRequest(run_id="r", completions=[pb.RewardedCompletion(token_ids=[97])])
            calls: list[Any] = []

            def call() -> None:
                """Once this thread is lent, so that it is the one that goes on."""
                if not calls:
                    calls.append(stub.ScoreGroup.future(asked, timeout=60))

            background.run(lambda: began.wait(60), lambda ended: made.wait(ended, call))
    finally:
        made.logger.removeHandler(handler)
    assert len(told) == 1 and "a reward function or a tool has not returned" in told[0]


def test_the_thread_that_waits_calls_the_functions(make: Any) -> None:
    threads: list[int] = []

    def noted(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        threads.append(threading.get_ident())
        assert (trainer_state.global_step, trainer_state.max_steps) == (0, 10)
        return length(completions)

    made = make(reward_funcs=noted)
    run = made.translated()
    background: Background[list[float]] = Background()

    def work() -> list[float]:
        with grpc.insecure_channel(run.config.env[0].args["address"]) as channel:
            stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            asked = [pb.RewardedCompletion(member=at, token_ids=[97] * at) for at in range(3)]
            said = stub.ScoreGroup(pb.ScoreGroupRequest(run_id="r", completions=asked), timeout=60)
            return [one.scores[0].value for one in said.rewards]

    with made.beside(run, background.end):
        found = background.run(work, lambda ended: made.wait(ended, lambda: None))
    assert len(found) == 3 and threads == [threading.get_ident()]


def test_what_a_function_raises_ends_what_waits_for_it(make: Any) -> None:
    """trainer.py 3, without the services."""
    wrong = LookupError("mine")

    def raising(**_: Any) -> list[float]:
        raise wrong

    made = make(reward_funcs=raising)
    run = made.translated()
    background: Background[Any] = Background()

    def work() -> Any:
        with grpc.insecure_channel(run.config.env[0].args["address"]) as channel:
            stub: Any = rpc.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            asked = [pb.RewardedCompletion(token_ids=[97])]
            stub.ScoreGroup(pb.ScoreGroupRequest(run_id="r", completions=asked), timeout=60)

    with pytest.raises(LookupError) as caught, made.beside(run, background.end):
        background.run(work, lambda ended: made.wait(ended, lambda: None))
    assert caught.value is wrong


def row(step: int, **more: float) -> str:
    usual = {"train/reward": 1.0 * step, "train/loss": 0.5, "train/learning_rate": 0.1 * step}
    return json.dumps({"step": step, **usual, **{key.replace("__", "/"): one for key, one in more.items()}})


def test_its_history_is_by_trls_names(make: Any, args: GRPOConfig, tmp_path: Path) -> None:
    args.reward_weights = [1.0, 0.0]
    made = make(reward_funcs=[length, other])
    (tmp_path / "run").mkdir()
    measured = {"eval/reward": 0.25, "eval/reward-service/reward": 0.25, "eval/reward-service/pass@1": 0.5}
    measured |= {"eval/mean_length": 4.0, "eval/reward-service/rewards/length": 2.0}
    measured |= {"eval/reward-service/metrics/other": 6.0, "eval/reward-service/metrics/exact": 0.75}
    measured |= {"eval/reward-service/metrics/reward": 9.0}
    tools = {"metrics/tools/call_frequency": 4.0, "metrics/tools/failures": 3.0}
    measured |= {f"eval/reward-service/{name}": value for name, value in tools.items()}
    lines = [
        row(
            1,
            rewards__length=1.0,
            metrics__other=3.0,
            metrics__exact=0.5,
            metrics__reward=8.0,
            metrics__tools__call_frequency=2.0,
            metrics__tools__failures=0.5,
            rollout__mean_length=7.0,
        ),
        row(
            2,
            rewards__length=3.0,
            metrics__other=5.0,
            metrics__tools__call_frequency=0.0,
            metrics__tools__failures=0.0,
            train__clipped_fraction=0.5,
        ),
        json.dumps({"step": 2, **measured}),
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    state = made.state
    # 20 prompts are 20 batches of a group.
    assert (state.global_step, state.max_steps, state.epoch) == (2, 10, 0.1)
    assert state.log_history == [
        {
            "step": 2,
            "epoch": 0.1,
            "reward": 1.5,
            "loss": 0.5,
            "learning_rate": 0.2,
            "rewards/length/mean": 2.0,
            "rewards/other/mean": 4.0,
            "exact": 0.5,
            "metrics/reward": 8.0,
            "tools/call_frequency": 1.0,
            "tools/failure_frequency": 0.125,
            "completions/mean_length": 7.0,
            "clip_ratio/region_mean": 0.5,
        },
        {
            "step": 2,
            "epoch": 0.1,
            "eval_reward": 0.25,
            "eval_pass@1": 0.5,
            "eval_completions/mean_length": 4.0,
            "eval_rewards/length/mean": 2.0,
            "eval_rewards/other/mean": 6.0,
            "eval_exact": 0.75,
            "eval_metrics/reward": 9.0,
            "eval_tools/call_frequency": 4.0,
            "eval_tools/failure_frequency": 0.75,
        },
    ]
    args.loss_type = "cispo"
    assert "cispo_clip_ratio" in made.state.log_history[0]
    args.loss_type = "sapo"
    assert not any("clip_ratio" in name for name in made.state.log_history[0])


def test_what_functions_are_told_of_the_run_is_read_again_where_there_is_more(
    make: Any, tmp_path: Path
) -> None:
    made = make()
    before = made._state_of_rewards()
    assert before.global_step == 0 and made._state_of_rewards() is before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(row(1) + "\n")
    assert made._state_of_rewards().global_step == 1


def test_a_line_of_the_run_is_in_the_words_of_the_script(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "environment 'reward-service' at the host h:1 is not what the run began with: its examples, "
    for made, what in (
        (make(), "train_dataset"),
        (make(eval_dataset=ROWS[:2]), "train_dataset or eval_dataset"),
    ):
        Lines(made.translated().logging, made.in_words).say(f"{line}digest a -> b; the run goes on")
        assert capsys.readouterr().out.endswith(f" s  changed since the run began: {what}; the run goes on\n")
    unlike = make().in_words(line.replace("its examples, ", "") + "digest a -> b")
    assert unlike == "changed since the run began: train_dataset or reward_funcs"


def test_an_evaluation_needs_a_data_set(make: Any) -> None:
    with pytest.raises(ConfigError, match="evaluate: there is no eval_dataset; give one to GRPOTrainer"):
        make().evaluate()


def test_an_evaluation_is_served_elsewhere_and_called_as_trl_does(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = make(eval_dataset=ROWS[:5]), []

    def measured(config: Any, model: str, outputs: Path, play: Any) -> dict[str, float]:
        seen.append(config.env[0].args["address"])
        assert config.eval.rollouts_per_example == 8
        own = {
            "eval_rewards/tools/call_frequency": 3.0,
            "eval_rewards/reward": 4.0,
            "eval_rewards/tools/failures": 0.75,
        }
        return {"eval_reward": 1.0, "eval_rewards/length": 2.0, "eval_failed": 0.0, **own}

    monkeypatch.setattr("quartet.grpo.measuring.measured", measured)
    found = made.evaluate()
    assert found == {
        "eval_reward": 1.0,
        "eval_rewards/length/mean": 2.0,
        "eval_failed": 0.0,
        "eval_tools/call_frequency": 3.0,
        "eval_tools/failure_frequency": 0.25,
        "eval_rewards/reward": 4.0,
    }
    assert seen and seen[0] != made.translated().config.env[0].args["address"]
    assert not Path(seen[0].removeprefix("unix:")).parent.exists()


def test_a_folder_that_holds_a_run_is_refused_in_the_words_of_a_script(
    make: Any, args: GRPOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    with pytest.raises(ConfigError, match=r"^train\(resume_from_checkpoint=True\): .* holds no run"):
        made.train(resume_from_checkpoint=True)
    with accepted(prepared(made.translated().config, made.folder, None, resume=False, overwrite=False)):
        pass
    with pytest.raises(ConfigError, match=r"is not empty; add train\(resume_from_checkpoint=True\) to go on"):
        make().train()
    args.temperature = 0.5
    with (
        pytest.raises(ConfigError, match=r"sampling\.temperature was 1\.0 and is 0\.5") as caught,
        caplog.at_level(logging.WARNING, "quartet.trl"),
    ):
        make().train(resume_from_checkpoint=True)
    assert "quartet rl" not in str(caught.value)


@contextmanager
def serving(made: GRPOTrainer, at: str) -> Iterator[None]:
    with served(made._functions, made._train, None, at, lambda _: None):
        yield
    address.remove(at)


def test_two_trainers_of_one_run_do_not_serve_at_once(make: Any) -> None:
    made = make()
    run = made.translated()
    with (
        serving(made, run.config.env[0].args["address"]),
        pytest.raises(
            ConfigError, match="this run is trained already: somebody serves its reward functions at"
        ),
        made.beside(run, lambda _: None),
    ):
        pass
