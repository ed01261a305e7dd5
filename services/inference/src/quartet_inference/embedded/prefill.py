"""Computing keys and values of whole sequences.

For requests that join, new ones and those whose keys were lost.

1. Rows of one call are neighbours. Every row ends with the keys and values of all its tokens.
2. One forward pass handles at most PREFILL_TOKENS padded tokens, and MASK_ELEMENTS of them times positions
   that they may see; a longer prompt goes in pieces.
3. Padding is written one position behind the row's last token, where the next decode step overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quartet_inference.embedded.forward import Forward

#: Padded tokens per pass: enough to fill the matrix units, few enough that the activations stay small.
PREFILL_TOKENS = 2048
#: Of one pass's attention mask: 64 MiB of float64; and of what kernels take (attention.py 4), 16 MiB of
#: bfloat16 for each query head of a key head.
MASK_ELEMENTS = 1 << 23


def prefill(
    forward: Forward, first_row: int, sequences: Sequence[Sequence[int]], starts: Sequence[int]
) -> Tensor:
    """Compute positions starts[i].. of each sequence in row first_row + i.

    The logits after the last token of each.

    The caller has reserved one position more than the longest sequence.
    """
    logits: list[Tensor] = []
    begin = 0
    while begin < len(sequences):
        end = begin + 1
        longest, context = len(sequences[begin]) - starts[begin], len(sequences[begin]) + 1
        while end < len(sequences):
            longer = max(longest, len(sequences[end]) - starts[end])
            wider = max(context, len(sequences[end]) + 1)
            if (end + 1 - begin) * longer > min(PREFILL_TOKENS, MASK_ELEMENTS // wider):
                break
            longest, context, end = longer, wider, end + 1
        piece = max(1, min(PREFILL_TOKENS, MASK_ELEMENTS // context))
        rows = slice(begin, end)
        if longest <= piece:
            logits.append(_pass(forward, first_row + begin, sequences[rows], starts[rows], context))
        else:
            assert end == begin + 1
            logits.append(_in_pieces(forward, first_row + begin, sequences[begin], starts[begin], piece))
        begin = end
    return torch.cat(logits)


def _in_pieces(forward: Forward, row: int, sequence: Sequence[int], start: int, piece: int) -> Tensor:
    logits = torch.empty(0)
    while start < len(sequence):
        end = min(len(sequence), start + piece)
        logits = _pass(forward, row, [sequence[:end]], [start], end + 1)
        start = end
    return logits


def _pass(
    forward: Forward, row: int, sequences: Sequence[Sequence[int]], starts: Sequence[int], context: int
) -> Tensor:
    longest = max(len(tokens) - start for tokens, start in zip(sequences, starts, strict=True))
    ids, positions, last = [], [], []
    for tokens, start in zip(sequences, starts, strict=True):
        count, padding = len(tokens) - start, longest - (len(tokens) - start)
        assert count > 0, "a row needs at least one token to compute"
        ids.append([*tokens[start:], *[0] * padding])
        positions.append([*range(start, len(tokens)), *[len(tokens)] * padding])
        last.append(count - 1)
    return forward(row, torch.tensor(ids), torch.tensor(positions), context, torch.tensor(last))
