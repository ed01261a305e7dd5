"""A GRPO job against TRL's GRPOTrainer: CPU time of a step, time of the job, and the reward in the end.

Both train the same random tiny model (0.63 million parameters) to say digits: 8 prompts x 8 completions of at
most 64 tokens for `--steps` steps, the same loss (clip 0.2, means of sequence means, advantages over the
group's standard deviation, no divergence term), learning rate, warm-up and AdamW settings, the same reward
(the share of digits), one thread in each process. TRL runs in one process and generates with transformers;
Quartet is `quartet rl`, its four services as processes, the reward a Verifiers environment
(benchmarks/digits). They run in turns, `--rounds` times. What the environment says to OpenBLAS is left out
for both: TRL computes nothing by it, Quartet its attention, which shall have the processor's own kernels.

- CPU per step: all processes together, from the end of step 5 to the end of the last but one (TRL: of the
  last). Quartet samples the next batch while it trains one (`max_off_policy_steps = 1`, its default; TRL
  trains each batch before it samples the next): at both ends the next batch is under way.
- The whole job: from the start of the command to its model on disk.
- Reward: of 256 completions at temperature 1, sampled by transformers for both.

TRL is in the `dev` group of pyproject.toml, so `make install` has it.

    python benchmarks/vs_trl.py [--steps 30] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figure, arguments, report
from quartet.cli.tiny.files import write_model_files
from quartet.local.toml_text import dumps

REPOSITORY = Path(__file__).resolve().parent.parent
DIGITS = REPOSITORY / "benchmarks/digits"
PROMPTS, GROUP, MAX_TOKENS = 8, 8, 64
#: Steps before the measurement of CPU time begins: imports, caches, first batches.
WARM_UP = 5
LEARNING_RATE, WARM_UP_RATE_STEPS, BETA2, MAX_GRAD_NORM, CLIP = 1e-3, 3, 0.95, 1.0, 0.2
EVALUATED = 256
POLL_SECONDS = 0.02
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


def environment() -> dict[str, str]:
    """That of both."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")} | QUIET


@dataclass(frozen=True)
class Job:
    """One finished job."""

    cpu_per_step: float
    seconds: float
    reward: float


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        train_with_trl(options.model, options.trl, options.steps)
        return
    if options.make:
        make_model(options.make, options.seed)
        print(json.dumps(score(options.make)))
        return
    if options.score:
        print(json.dumps(score(options.score)))
        return
    jobs: dict[str, list[Job]] = {"trl": [], "quartet": []}
    begun = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="quartet-trl-") as folder:
            work = Path(folder)
            begun.append(float(in_own_process("--make", str(work / "model"), "--seed", str(number))))
            jobs["trl"].append(trl_job(work / "model", work / "trl", options.steps))
            jobs["quartet"].append(quartet_job(work / "model", work / "quartet", options.steps, number))
            print(f"round {number}: {jobs['trl'][-1]} {jobs['quartet'][-1]}", file=sys.stderr, flush=True)
    report(
        figures_of(jobs["trl"], jobs["quartet"], statistics.mean(begun)), options.json, steps=options.steps
    )


def figures_of(theirs: Sequence[Job], ours: Sequence[Job], begun: float) -> list[Figure]:
    """Ratios are of the runs of a round, then their median."""
    pairs = list(zip(ours, theirs, strict=True))
    cpu = statistics.median(one.cpu_per_step / other.cpu_per_step for one, other in pairs)
    faster = statistics.median(other.seconds / one.seconds for one, other in pairs)
    rewards = [statistics.mean(job.reward for job in jobs) for jobs in (theirs, ours)]
    return [
        Figure("TRL: CPU of a step", statistics.median(job.cpu_per_step for job in theirs), "CPU s"),
        Figure("Quartet: CPU of a step", statistics.median(job.cpu_per_step for job in ours), "CPU s"),
        Figure("CPU of a step, Quartet over TRL", cpu, "ratio", "<= 0.7"),
        Figure("TRL: whole job", statistics.median(job.seconds for job in theirs), "s"),
        Figure("Quartet: whole job", statistics.median(job.seconds for job in ours), "s"),
        Figure("whole job, TRL over Quartet", faster, "ratio", ">= 1.5"),
        Figure("reward before", begun, ""),
        Figure("reward after, TRL", rewards[0], ""),
        Figure("reward after, Quartet", rewards[1], ""),
        # Two jobs of one system that differ in the seed differ by about as much.
        Figure("reward after, Quartet minus TRL", rewards[1] - rewards[0], "", ">= -0.02"),
    ]


def in_own_process(*command: str) -> str:
    """The last line that this script prints."""
    done = subprocess.run(
        [sys.executable, __file__, *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment(),
    )
    return done.stdout.splitlines()[-1]


def trl_job(model: Path, output: Path, steps: int) -> Job:
    """Train with TRL and score what it wrote."""
    began = time.monotonic()
    said = in_own_process("--model", str(model), "--trl", str(output), "--steps", str(steps))
    seconds = time.monotonic() - began
    return Job(json.loads(said), seconds, json.loads(in_own_process("--score", str(output))))


def quartet_job(model: Path, output: Path, steps: int, seed: int) -> Job:
    """Train with `quartet rl` and score its checkpoint."""
    config = {
        "model": str(model),
        "seed": seed,
        "max_steps": steps,
        "batch_size": PROMPTS * GROUP,
        "rollouts_per_example": GROUP,
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARM_UP_RATE_STEPS,
        "adam_beta2": BETA2,
        "max_grad_norm": MAX_GRAD_NORM,
        "sampling": {"max_tokens": MAX_TOKENS},
        "env": [{"id": "digits"}],
        "algorithm": {"preset": "grpo", "epsilon": CLIP},
        # What TRL does not do here either.
        "eval": {"num_examples": 0},
        "ckpt": {"interval": steps},
        "envhost": {"python": str(REPOSITORY / ".venv-envs/bin/python")},
    }
    path = os.pathsep.join([str(DIGITS), *filter(None, [os.environ.get("PYTHONPATH")])])
    file = output.with_suffix(".toml")
    file.write_text(dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "quartet.cli", "rl", "@", str(file), "--output-dir", str(output)]
    began = time.monotonic()
    with (output.with_suffix(".log")).open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment() | {"PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        first = cpu_at_step(process, output / "metrics.jsonl", WARM_UP)
        last = cpu_at_step(process, output / "metrics.jsonl", steps - 1)
        code = process.wait()
    seconds = time.monotonic() - began
    assert code == 0, output.with_suffix(".log").read_text()[-2000:]
    reached = json.loads(in_own_process("--score", str(output / "checkpoint")))
    return Job((last - first) / (steps - 1 - WARM_UP), seconds, reached)


def cpu_at_step(process: subprocess.Popen[bytes], metrics: Path, step: int) -> float:
    """CPU seconds of a job's processes when it has written the metrics of so many steps."""
    size = 0
    while process.poll() is None:
        # Nothing else is looked at meanwhile: the job has the machine to itself, as TRL's has.
        if metrics.exists() and (grown := metrics.stat().st_size) > size:
            size = grown
            if metrics.read_text().count('"train/loss"') >= step:
                return cpu_of_family(process.pid)
        time.sleep(POLL_SECONDS)
    raise AssertionError(f"the job ended with {process.returncode} before step {step}; see its log")


def cpu_of_family(process: int) -> float:
    """CPU seconds, user and system, of a process and all below it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        pid = int(file.parent.name)
        # With the time of children that ended and were waited for.
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    held = {process}
    while grown := {pid for pid, parent in parents.items() if parent in held} - held:
        held |= grown
    return sum(ticks[pid] for pid in held) / os.sysconf("SC_CLK_TCK")


def settings_of_trl(output: Path, steps: int) -> dict[str, Any]:
    """What the run's file says, as a GRPOConfig takes it."""
    return {
        "output_dir": str(output / "work"),
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": MAX_TOKENS,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARM_UP_RATE_STEPS,
        "adam_beta2": BETA2,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "loss_type": "grpo",
        "epsilon": CLIP,
        "beta": 0.0,
        "temperature": 1.0,
        "top_k": 0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1000,
    }


def train_with_trl(model: Path, output: Path, steps: int) -> None:
    """In a process of its own; prints CPU seconds per step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    # `make install` brings it for Quartet's tests; TRL imports it wherever it is, for nothing here.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    rows = [{"prompt": prompt(index)} for index in range(PROMPTS * steps)]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")

    def rewards(completions: Any, **others: Any) -> list[float]:
        return [digit_share(said[0]["content"]) for said in completions]

    class Clock(TrainerCallback):  # type: ignore[misc]
        spent: dict[int, float] = {}  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            self.spent[state.global_step] = usage.ru_utime + usage.ru_stime

    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=rewards,
        args=GRPOConfig(**settings_of_trl(output, steps)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model(str(output))
    print(json.dumps((clock.spent[steps] - clock.spent[WARM_UP]) / (steps - WARM_UP)))


def make_model(folder: Path, seed: int) -> None:
    """The architecture of `quartet model tiny`, random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_files(folder)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def score(folder: Path) -> float:
    """Mean reward of a model's completions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    asked = tokenizer.apply_chat_template(
        [prompt(index) for index in range(EVALUATED)],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = model.generate(**asked, max_new_tokens=MAX_TOKENS, do_sample=True, top_k=0, use_cache=True)
    answers = tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.mean(map(digit_share, answers))


def prompt(index: int) -> list[dict[str, str]]:
    """As the environment asks."""
    return [{"role": "user", "content": f"number {index:08d}:"}]


def digit_share(text: str) -> float:
    """As the environment rewards."""
    return sum(character in "0123456789" for character in text) / max(1, len(text))


if __name__ == "__main__":
    main()
