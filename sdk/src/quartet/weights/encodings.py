"""How a changed tensor of a delta is carried: the smallest of what was measured on this tensor in this step.

1. The choice is between SPARSE, XOR_ZSTD and DENSE, and never larger than DENSE.
2. Small tensors are encoded both ways. Of large ones a sample is, and the whole only the way that won
   CLEARLY; where the sample was not clear, or the whole did not keep what it promised, both ways again.
3. The same base and tensor are always carried the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quartet.v1 import weights_pb2 as pb
from quartet.weights import sparse, xor
from quartet.weights.tensor import Tensor

#: Tensors up to this size are encoded both ways without a sample: it costs less than a millisecond.
SMALL_BYTES = 1 << 17
#: A sample is this share of the tensor, in pieces of SAMPLE_PIECE_BYTES spread evenly over it.
SAMPLE_SHARE = 1 / 64
SAMPLE_PIECE_BYTES = 1 << 13
#: The sample decides alone where one way needs less than this share of the other's bytes.
CLEARLY = 0.93


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as a payload carries it: no parts where it is UNCHANGED."""

    encoding: pb.TensorEncoding
    parts: list[memoryview | bytes]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))


def encode_tensor(base: Tensor | None, new: Tensor) -> Encoded:
    """Carry a tensor that changed to a reader that holds `base` under its name, or nothing."""
    if base is None or (base.dtype, base.shape) != (new.dtype, new.shape):
        return Encoded(pb.TENSOR_ENCODING_DENSE, [new.data])
    best = _best_delta(base, new)
    return best if best.size < new.nbytes else Encoded(pb.TENSOR_ENCODING_DENSE, [new.data])


def decode_tensor(encoding: int, blob: memoryview, base: Tensor, out: memoryview) -> None:
    """Undo SPARSE or XOR_ZSTD into `out`. ValueError says what is wrong with the blob."""
    if encoding == pb.TENSOR_ENCODING_SPARSE:
        sparse.decode(blob, base.data, base.dtype, out)
    elif encoding == pb.TENSOR_ENCODING_XOR_ZSTD:
        xor.decode(blob, base.data, out)
    else:
        raise ValueError(f"encoding {encoding} is not one of a delta")


def _best_delta(base: Tensor, new: Tensor) -> Encoded:
    if new.nbytes <= SMALL_BYTES:
        return min(_sparse(base, new), _xor(base, new), key=lambda encoded: encoded.size)
    old_sample, new_sample = _sample(base), _sample(new)
    promised = _sparse(old_sample, new_sample).size, _xor(old_sample, new_sample).size
    if promised[0] < CLEARLY * promised[1]:
        first, second, expected = _sparse, _xor, promised[0]
    elif promised[1] < CLEARLY * promised[0]:
        first, second, expected = _xor, _sparse, promised[1]
    else:
        return min(_sparse(base, new), _xor(base, new), key=lambda encoded: encoded.size)
    best = first(base, new)
    if best.size * CLEARLY > expected * (new.nbytes / new_sample.nbytes):
        best = min(best, second(base, new), key=lambda encoded: encoded.size)
    return best


def _sparse(base: Tensor, new: Tensor) -> Encoded:
    return Encoded(pb.TENSOR_ENCODING_SPARSE, [*sparse.encode(base.data, new.data, new.dtype)])


def _xor(base: Tensor, new: Tensor) -> Encoded:
    return Encoded(pb.TENSOR_ENCODING_XOR_ZSTD, [*xor.encode(base.data, new.data)])


def _sample(tensor: Tensor) -> Tensor:
    """Pieces from everywhere in the tensor, as one flat tensor of its dtype."""
    data = np.frombuffer(tensor.data, np.uint8)
    whole = data[: len(data) // SAMPLE_PIECE_BYTES * SAMPLE_PIECE_BYTES].reshape(-1, SAMPLE_PIECE_BYTES)
    pieces = max(1, round(len(whole) * SAMPLE_SHARE))
    chosen = whole[np.linspace(0, len(whole) - 1, pieces).astype(np.int64)]
    values = chosen.size // (tensor.nbytes // max(1, int(np.prod(tensor.shape))))
    return Tensor(tensor.dtype, (values,), chosen.reshape(-1).data)
