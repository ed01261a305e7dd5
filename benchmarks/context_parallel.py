"""Context parallelism: what a rank holds of one long sequence that several ranks share.

A random Qwen3 of `--layers` layers, one forward and backward pass over one sample of `--tokens` tokens, by 1,
2 and 4 ranks over gloo on the CPU. Measured is how far the peak of a rank's memory lies above its part of the
model and the gradients, the largest of all ranks. Gradients are the same for all.

    python benchmarks/context_parallel.py [--tokens 4096] [--layers 8] [--hidden 256] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from figures import Figure, arguments, report
from peak_memory import GIB, Watch
from random_qwen3 import VOCABULARY, random_qwen3

RANKS = (1, 2, 4)
#: A half and a quarter, and a tenth for what does not become less: the weights of a layer, gathered.
BARS = ("", "<= 0.6", "<= 0.35")
SECONDS = 600


def main() -> None:
    """Run all groups and compare."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="measure in this rank, with the model of this folder")
    options = parser.parse_args()
    if options.folder:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        random_qwen3(options.hidden, options.layers).save_pretrained(folder)
        alone, two, four = (measured(Path(folder), ranks) for ranks in RANKS)
    figures = [Figure("peak of activations, one rank", alone["peak_bytes"] / GIB, "GiB")]
    for ranks, bar, found in zip(RANKS[1:], BARS[1:], (two, four), strict=True):
        of_all = f"each of {ranks} ranks"
        figures += [
            Figure(f"peak, {of_all}, over one", found["peak_bytes"] / alone["peak_bytes"], "ratio", bar),
            Figure(f"CPU time of all {ranks} ranks, over one", found["seconds"] / alone["seconds"], "ratio"),
            Figure(
                f"relative difference of gradient norms, {ranks} ranks", apart(found, alone), "", "<= 1e-5"
            ),
        ]
    report(figures, options.json, **{key: getattr(options, key) for key in ("tokens", "layers", "hidden")})


def apart(found: dict[str, float], alone: dict[str, float]) -> float:
    """Of gradient norms."""
    return abs(found["norm"] - alone["norm"]) / alone["norm"]


def measured(folder: Path, ranks: int) -> dict[str, float]:
    """The largest peak of a rank, and the CPU time of all."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    own = [__file__, "--folder", str(folder), *sys.argv[1:]]
    subprocess.run([sys.executable, *torchrun, *own], check=True, timeout=SECONDS)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "peak_bytes": max(one["peak_bytes"] for one in found),
        "seconds": sum(one["seconds"] for one in found),
        "norm": found[0]["norm"],
    }


def measure(options: Namespace) -> None:
    """One pass in this rank."""
    import torch
    from quartet_trainer.machine import Machine
    from quartet_trainer.packing import cut, rows_of
    from quartet_trainer.placement import placed
    from quartet_trainer.ranks.group import Group, leave
    from quartet_trainer.recompute import NOTHING
    from quartet_trainer.sample import make_sample

    torch.set_num_threads(1)
    device = torch.device("cpu")
    group = Group(device, int(os.environ["WORLD_SIZE"]))
    model = placed(Machine(device, options.tokens, 1, False, ranks=group), options.folder, "random", None)
    policy = group.policy(model, device, None, NOTHING)

    def gradients(tokens: int) -> None:
        ids = torch.randint(0, VOCABULARY, (tokens + 1,), generator=torch.Generator().manual_seed(1)).tolist()
        samples = [make_sample(0, ids, [(1, tokens, 0)], [], [])]
        for batch in group.even(cut(samples, rows_of(samples, [0], 1), tokens, 1), 0):
            logp, _ = policy(batch, 1.0)
            torch.autograd.backward(logp.mean())

    # Gradients and libraries' own buffers exist before the measurement.
    gradients(64)
    model.zero_grad(set_to_none=False)
    watch = Watch(device)
    began = time.process_time()
    gradients(options.tokens)
    seconds, peak_bytes = time.process_time() - began, watch.stop()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    found = {"peak_bytes": peak_bytes, "seconds": seconds, "norm": float(norm.full_tensor())}
    (options.folder / f"rank{group.rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
