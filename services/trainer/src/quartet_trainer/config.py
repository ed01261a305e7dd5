"""Configuration of the trainer service. Read without importing torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from quartet.config import Config
from quartet.kit.server import ServerConfig

from quartet_trainer.retention import MAX_STATES


class TrainerConfig(Config):
    """Where the trainer listens, computes and saves."""

    server: ServerConfig = ServerConfig()
    #: Folder of saved states; each run has a folder of its own in it.
    state_dir: Path = Path("outputs/trainer")
    #: Newest saved states that stay of a run that does not say how many; older ones go after each save.
    keep_last: int = Field(default=2, ge=1, le=MAX_STATES)
    #: No run has more states than this, whatever it asks to keep: a bound of what it takes of the disk.
    max_states: int = Field(default=MAX_STATES, ge=1, le=MAX_STATES)
    #: "auto" takes CUDA where there is a device.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: Processes that train together, of this machine; with CUDA each has a device of its own (docs/ranks.md).
    ranks: int = Field(default=1, ge=1, le=64)
    #: So many neighbouring ranks share each sequence, for long ones: a divisor of all ranks (docs/ranks.md).
    context_parallel: int = Field(default=1, ge=1, le=64)
    #: Threads of torch. On a machine shared with other processes more than one costs more than it gives.
    threads: int = Field(default=1, ge=1, le=256)
    #: Tokens of a micro-batch where the run does not say.
    microbatch_tokens: int = Field(default=8192, ge=1)
    #: Samples that share a prompt are put into one row up to this length; by default as suits the attention:
    #: 1024, or 256 where it needs a mask of the row's square.
    row_tokens: int | None = Field(default=None, ge=1, le=65536)
    #: Compute activations anew in the backward pass of every run instead of keeping them; a run may ask, too.
    gradient_checkpointing: bool = False
    #: Then keep what attention's kernels give: in long sequences computing it anew takes much time.
    keep_attention: bool = False
    #: Moments of the optimizers rest in host memory between steps; on a CPU they are there anyway.
    optimizer_offload: bool = False
    #: Published versions of a run that stay fetchable.
    published_versions: int = Field(default=2, ge=1, le=64)
    #: Runs held in memory at once.
    max_runs: int = Field(default=4, ge=1, le=64)
    #: Equal calls give equal bits. On CUDA this chooses slower kernels.
    deterministic: bool = True
    #: Liger's fused layer kernels on CUDA; "auto" uses them where liger-kernel is installed (kernels.py).
    liger: Literal["auto", "on", "off"] = "auto"
    #: Losses of one's own: name = "module:function" (quartet_trainer/loss/custom.py). A run chooses by name.
    losses: dict[str, str] = Field(default_factory=dict)
    #: Allow base models to be fetched from the Hugging Face hub.
    hub: bool = True
