"""GRPOTrainer of quartet.trl: what it takes and refuses, and what is its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy
import pytest
from quartet.cli.sft.template import Template
from quartet.grpo.background import Background
from quartet.scripts.models import get_model, get_tokenizer
from quartet.trl import ConfigError, GRPOConfig, GRPOTrainer, LoraConfig
from quartet.v1 import common_pb2
from quartet.v1 import reward_service_pb2 as pb
from quartet.v1 import reward_service_pb2_grpc as rpc
from trl_trainers import CHATS, ROWS, arguments, length, maker, other

HEAVY = ("torch", "transformers", "grpc", "numpy", "matplotlib", "rich", "datasets", "tokenizers", "trl")


def shout(text: str) -> str:
    """Says it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


@pytest.fixture
def args(tmp_path: Path) -> GRPOConfig:
    return arguments(tmp_path)


@pytest.fixture
def make(chat_model: Path, args: GRPOConfig) -> Any:
    return maker(chat_model, args)


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


class Columned:
    def reset(self, start: int) -> None: ...


class Strict:
    def reset(self, prompt: Any) -> None: ...


def answered(answer: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in answer]


class Asking(Silent):
    def get_reward(self, completions: Any) -> float:
        return 0.0


class Constant(Silent):
    get_reward = 3


class Unrewarded(Asking):
    get_reward = None  # type: ignore[assignment]


class Door(Silent):
    def push(self) -> str:
        """Pushes it."""
        return "open"


def push() -> str:
    """Pushes something else."""
    return ""


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
        ({"reward_funcs": ()}, "reward_funcs is missing: give a function"),
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
        ({"environment_factory": Unrewarded, "reward_funcs": None}, "reward_funcs is missing: give a"),
        (
            {"environment_factory": Columned, "train_dataset": CHATS},
            "cannot be called with prompt: missing a required argument: 'start'; add **columns",
        ),
        (
            {"environment_factory": Strict, "train_dataset": CHATS, "eval_dataset": [{**CHATS[0], "a": 1}]},
            "cannot be called with prompt, a: got an unexpected keyword argument 'a'; add **columns",
        ),
        (
            {"environment_factory": Columned, "train_dataset": CHATS},
            "reset of Columned (test_trl_trainer.py:",
        ),
        (
            {"reward_funcs": answered, "eval_dataset": [{"prompt": "a"}]},
            "missing a required argument: 'answer'; add **kwargs",
        ),
        ({"environment_factory": Asking}, "get_reward of Asking (test_trl_trainer.py:"),
        ({"environment_factory": Asking}, "is called without arguments, and cannot be: missing a required"),
        ({"environment_factory": Constant}, "get_reward of Constant is int, which is not called; write def"),
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

    class Loaded(SimpleNamespace):
        """As transformers has it."""

        @classmethod
        def from_pretrained(cls, folder: str) -> Loaded:
            return cls(name_or_path=folder, eos_token="</s>")

    tokenizer = Loaded.from_pretrained(str(chat_model))
    tokenizer.pad_token = "</s>"
    make(processing_class=tokenizer)
    tokenizer.eos_token = "<|im_end|>"
    with pytest.raises(
        ConfigError, match=r"^processing_class has another end token, '<\|im_end\|>', than its folder, .*copy"
    ):
        make(processing_class=tokenizer)


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


def test_an_evaluation_needs_a_data_set(make: Any) -> None:
    with pytest.raises(ConfigError, match="evaluate: there is no eval_dataset; give one to GRPOTrainer"):
        make().evaluate()


def test_of_a_run_that_was_stopped_another_trainer_measures_the_model(make: Any, tmp_path: Path) -> None:
    """No command has its reward functions."""
    (tmp_path / "run").mkdir()
    row = {"step": 1, "train/reward": 1.0, "train/learning_rate": 0.1}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"is not completed; .* evaluate\(\) of another GRPOTrainer"):
        make(eval_dataset=ROWS).evaluate()
