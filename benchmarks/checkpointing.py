"""Gradient checkpointing: what it saves and what it costs, with equal gradients.

Each way runs in a process of its own: a random Qwen3 of `--layers` layers, one forward and backward pass over
`--tokens` tokens in rows of `--row`. Measured is how far the peak of memory lies above model and gradients,
which both ways need: resident memory on a CPU, allocated memory on CUDA.

    python benchmarks/checkpointing.py [--tokens 8192] [--row 512] [--layers 12] [--hidden 256]
                                       [--device cpu] [--json FILE]
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

from figures import Figure, arguments, report
from peak_memory import GIB, Watch, in_own_process
from random_qwen3 import VOCABULARY, random_qwen3

WAYS = ("kept", "recomputed")


def main() -> None:
    """Run both ways and compare."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--row", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--way", choices=WAYS, help="measure this one in this process")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    kept, anew = (in_own_process(__file__, way) for way in WAYS)
    figures = [
        Figure("peak of activations, kept", kept["peak_bytes"] / GIB, "GiB"),
        Figure("peak of activations, computed anew", anew["peak_bytes"] / GIB, "GiB"),
        Figure("peak, anew over kept", anew["peak_bytes"] / kept["peak_bytes"], "ratio", "<= 0.5"),
        Figure("CPU time, anew over kept", anew["seconds"] / kept["seconds"], "ratio"),
        Figure("difference of gradient norms", abs(anew["norm"] - kept["norm"]), "", "== 0"),
    ]
    shape = {key: getattr(options, key) for key in ("tokens", "row", "layers", "hidden", "device")}
    report(figures, options.json, **shape)


def measure(options: Namespace) -> dict[str, float]:
    """One pass in this process."""
    import torch
    from quartet_trainer import attention
    from quartet_trainer.logprobs import PolicyForward
    from quartet_trainer.packing import pack
    from quartet_trainer.recompute import NOTHING, Recomputed, recomputable
    from quartet_trainer.sample import make_sample

    torch.set_num_threads(1)
    device = torch.device(options.device)
    model = random_qwen3(options.hidden, options.layers).eval().to(device)
    attention.use(model)
    recomputed = NOTHING if options.way == "kept" else Recomputed(recomputable(model, "random"))
    policy = PolicyForward(model, device, torch.bfloat16 if device.type == "cuda" else None, recomputed)
    rows = range(options.tokens // options.row)
    tokens = torch.randint(0, VOCABULARY, (len(rows), options.row + 1)).tolist()
    samples = [make_sample(row, tokens[row], [(1, options.row, 0)], [], []) for row in rows]
    (batch,) = pack(samples, rows, options.tokens, 1)
    (first,) = pack(samples, rows[:1], options.tokens, 1)
    # Gradients and libraries' own buffers exist before the measurement.
    torch.autograd.backward(policy(first, 1.0)[0].mean())
    watch = Watch(device)
    began = time.process_time()
    logp, _ = policy(batch, 1.0)
    torch.autograd.backward(logp.mean())
    seconds = time.process_time() - began
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    return {"peak_bytes": watch.stop(), "seconds": seconds, "norm": float(norm)}


if __name__ == "__main__":
    main()
