"""examples/trl_over_grpc as its README runs it: TRL's own trainer on an environment that a host runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY

pytest.importorskip("trl", reason="TRL is a development dependency")
pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples/trl_over_grpc"
SECONDS = 250
STEPS = 8
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the example's host."""
    port_file = tmp_path_factory.mktemp("host") / "port"
    command = [sys.executable, "-m", "quartet_envhost", "@", str(EXAMPLE / "envhost.toml")]
    command += ["--server.address", "127.0.0.1:0", "--server.port_file", str(port_file)]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        deadline = time.monotonic() + 180
        while not port_file.exists():
            assert process.poll() is None and time.monotonic() < deadline, "the host did not start"
            time.sleep(0.05)
        yield port_file.read_text().strip()
        process.terminate()


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import hosted as module

    yield module
    for name in ("hosted", "policy"):
        sys.modules.pop(name, None)


def texts(host: str) -> list[str]:
    """The texts that the environment asks to reverse, by task."""
    import grpc
    from quartet.v1 import envhost_service_pb2 as pb
    from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceStub

    ref = {"id": "reverse-text", "args_json": '{"min_chars": 4, "max_chars": 8}'}
    request = pb.GetTasksRequest(environment=ref, count=2000, include_data=True)
    with grpc.insecure_channel(host) as channel:
        tasks = EnvHostServiceStub(channel).GetTasks(request, timeout=60).tasks
    return [json.loads(task.data_json)["prompt"] for task in tasks]


def test_trl_trains_on_a_hosted_environment(host: str, tiny_model: Path, tmp_path: Path) -> None:
    """Weights move, the reward rises, and every reward is the environment's own for the text TRL sampled."""
    import pandas
    import torch
    import transformers
    from safetensors.torch import load_file

    command = [sys.executable, str(EXAMPLE / "train.py"), "--config", str(EXAMPLE / "grpo.yaml")]
    command += ["--host", host, "--model", str(tiny_model), "--output_dir", str(tmp_path)]
    command += ["--max_steps", str(STEPS), "--log_completions", "true"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model, tmp_path))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight"))

    steps = [pandas.read_parquet(file) for file in sorted((tmp_path / "completions").glob("*.parquet"))]
    assert [len(step) for step in steps] == [128] * STEPS
    asked, compared = texts(host), 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    limit = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())["max_completion_length"]
    for row in steps[0].itertuples():
        answer = re.fullmatch("<reversed_text>([a-z]*)</reversed_text>", row.completion)
        if answer is not None:
            alike = SequenceMatcher(None, answer[1], asked[int(row.prompt)][::-1]).ratio()
            # An answer without room for its end was cut, which earns nothing.
            expected = alike if len(tokenizer.encode(row.completion)) < limit else 0.0
            assert row.environment_reward == pytest.approx(expected, abs=1e-6), row
            compared += 1
    assert compared > 32, compared
    means = [float(step["environment_reward"].mean()) for step in steps]
    assert means[-1] > means[0] + 0.1, means


def test_turns_of_a_dialogue_are_one_sequence_with_what_the_environment_said_masked(
    host: str, tiny_model: Path, hosted: Any
) -> None:
    """Invariant 6 (tokens in, tokens out): the mask covers what the model sampled, turn by turn."""
    import torch
    import transformers
    from accelerate import Accelerator

    torch.manual_seed(0)  # of what is sampled
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    # As TRL has it while it trains.
    model.train().activation_checkpointing_enable()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    trainer = SimpleNamespace(
        model_wrapped=model,
        accelerator=Accelerator(cpu=True),
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=24, do_sample=True, temperature=0.8, top_k=0, **ends
        ),
        state=SimpleNamespace(global_step=3),
    )
    args = '{"min_turns": 3, "max_turns": 3}'
    environment = hosted.HostedEnvironment(host, "alphabet-sort", args)
    output = environment.rollouts(["0", "0", "1"], trainer)
    assert len(set(map(tuple, output["prompt_ids"][:2]))) == 1 != len(set(map(tuple, output["prompt_ids"])))
    rows = zip(
        *(output[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True
    )
    for prompt, completion, mask, logprobs in rows:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        plain = torch.log_softmax(logits / 0.8, -1)[range(len(completion)), completion]
        sampled = torch.tensor(mask, dtype=torch.bool)
        # Batched and padded on the left it differs in the last bits.
        torch.testing.assert_close(torch.tensor(logprobs)[sampled], plain[sampled], atol=1e-4, rtol=0)
        assert not torch.tensor(logprobs)[~sampled].any()
        said = tokenizer.decode([token for token, own in zip(completion, mask, strict=True) if not own])
        # Two later turns of the environment, each closed and opened by the template.
        assert said.count("<|im_start|>user\n") == said.count("<|im_start|>assistant\n") == 2, said


def test_a_failure_has_no_reward_and_no_token(hosted: Any) -> None:
    """Invariant 5."""
    from quartet.v1.rollout_pb2 import FAILURE_KIND_HOST, Rollout

    rollout = Rollout(member=1, reward=0.0, failure={"kind": FAILURE_KIND_HOST, "message": "killed"})
    column = hosted.sequence(rollout, 7)
    assert column["reward"] is None and not any(column["env_mask"])
    logged: dict[str, float] = {}
    assert hosted.environment_reward([0.5, None], logged.__setitem__) == [0.5, None]
    assert logged == {"rollouts/failed": 0.5}
