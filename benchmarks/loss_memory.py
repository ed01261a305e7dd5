"""Peak memory of the loss at a large vocabulary: the output layer in chunks against the logits in one piece.

Each way runs in a process of its own: hidden states of `--tokens` tokens, an output matrix of `--vocabulary`
rows, log-probabilities, and the backward pass of their sum. Measured is how far the peak lies above what the
inputs and their gradients take, which both ways need: resident memory on a CPU, allocated memory on CUDA.

Naive is what a plain trainer does: logits in the compute dtype, log_softmax in float32, gather.

    python benchmarks/loss_memory.py [--tokens 8192] [--vocabulary 151936] [--hidden 1024] [--dtype float32]
                                     [--device cpu] [--json FILE]
"""

from __future__ import annotations

import json
import time
from argparse import Namespace

from figures import Figure, arguments, report
from peak_memory import GIB, Watch, in_own_process

WAYS = ("naive", "chunked")


def main() -> None:
    """Run both ways and compare."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--way", choices=WAYS, help="measure this one in this process")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    found = {way: in_own_process(__file__, way) for way in WAYS}
    naive, chunked = found["naive"], found["chunked"]
    figures = [
        Figure("peak, naive", naive["peak_bytes"] / GIB, "GiB"),
        Figure("peak, chunked", chunked["peak_bytes"] / GIB, "GiB"),
        Figure("peak, chunked over naive", chunked["peak_bytes"] / naive["peak_bytes"], "ratio", "<= 0.25"),
        Figure("time, chunked over naive", chunked["seconds"] / naive["seconds"], "ratio"),
        Figure("difference of log-probabilities", abs(chunked["logp"] - naive["logp"]), "nats", "<= 1e-6"),
        Figure(
            "difference of gradient norms",
            abs(chunked["norm"] / naive["norm"] - 1),
            "ratio",
            "<= 1e-5" if options.dtype == "float32" else "<= 2e-2",
        ),
    ]
    shape = {key: getattr(options, key) for key in ("tokens", "vocabulary", "hidden", "dtype", "device")}
    report(figures, options.json, **shape)


def measure(options: Namespace) -> dict[str, float]:
    """Forward and backward once, and the memory above inputs and their gradients."""
    import torch
    from quartet_trainer.head import chunked_logprobs
    from quartet_trainer.logprobs import chunk_of, token_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    head = torch.nn.Linear(options.hidden, options.vocabulary, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, options.vocabulary, (options.tokens,), device=device)
    # Both gradients exist before the measurement: they are accumulated into.
    hidden.grad, head.weight.grad = torch.zeros_like(hidden), torch.zeros_like(head.weight)
    watch = Watch(device)
    began = time.perf_counter()
    if options.way == "naive":
        logp, _ = token_logprobs(head, hidden, targets, 1.0)
    else:
        chunk = chunk_of(options.vocabulary, device)
        logp, _ = chunked_logprobs(hidden, head.weight, targets, 1.0, chunk)
    torch.autograd.backward(logp.sum())
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    norm = float(hidden.grad.double().norm() + head.weight.grad.double().norm())
    return {
        "peak_bytes": watch.stop(),
        "seconds": seconds,
        "logp": float(logp.detach().double().mean()),
        "norm": norm,
    }


if __name__ == "__main__":
    main()
