"""Trainer, inference and gateway as processes on a tiny random model, as a person would start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 120.0


@dataclass(frozen=True)
class Stack:
    """Where they listen."""

    trainer: str
    inference: str
    gateway: str
    folder: Path
    model: Path


def write_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    fast.save_pretrained(folder)
    settings: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "eos_token_id": 257,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder)
    return folder


@contextmanager
def service(
    folder: Path, module: str, *arguments: str, port_key: str = "server.port-file", kill: bool = False
) -> Iterator[str]:
    """`python -m MODULE ARGUMENTS` until left, then asked to end or killed; yields its address."""
    port_file, log_file = folder / f"{module}.port", folder / f"{module}.log"
    port_file.unlink(missing_ok=True)
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, f"--{port_key}", str(port_file)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        give_up = time.monotonic() + START_SECONDS
        while not port_file.exists() or not port_file.read_text().endswith("\n"):
            if process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"{module} did not start:\n{log_file.read_text()[-3000:]}")
            time.sleep(0.05)
        yield port_file.read_text().strip()
    finally:
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def gateway(
    folder: Path,
    trainer: str,
    inference: str,
    *arguments: str,
    address: str = "127.0.0.1:0",
    kill: bool = False,
) -> Iterator[str]:
    """Another gateway of the same services."""
    with service(
        folder,
        "quartet_tinker",
        *("--trainer", trainer, "--inference", inference, "--address", address),
        *("--model-name", "tiny/random", *arguments),
        port_key="port-file",
        kill=kill,
    ) as served_at:
        yield served_at


@contextmanager
def replica(folder: Path, services: Stack, model: Path | None = None) -> Iterator[str]:
    """Another inference service of the same trainer; of its model, where no other is given."""
    follows = ("--model", str(model or services.model), "--weights-address", services.trainer)
    with service(folder, "quartet_inference", *follows) as address:
        yield address


@contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    """All three."""
    with ExitStack() as running:
        model = write_model(folder / "model")
        trainer = running.enter_context(
            service(folder, "quartet_trainer", "--state-dir", str(folder / "states"), "--device", "cpu",
                    "--max-runs", "16", "--keep-last", "8")
        )  # fmt: skip
        inference = running.enter_context(
            service(folder, "quartet_inference", "--model", str(model), "--weights-address", trainer)
        )
        address = running.enter_context(
            gateway(folder, trainer, inference, "--runs-dir", str(folder / "runs"))
        )
        yield Stack(trainer, inference, address, folder, model)
