"""From a Datum of the SDK to a sample of the contract.

A Datum has T input tokens and, for each, the target that follows it. A Sample is one sequence of T + 1 tokens
of which positions are covered: position t + 1 is the target of input t. So a target that counts must be the
next input token, as the SDK's own helpers make them; another one is refused, not approximated. Scripts put
any token at positions that do not count (the cookbook a 0 at those of a prompt): these have no gradient, and
NaN as their log-probability.

Shapes: T positions, N those whose target is the next input token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from quartet.v1 import trainer_service_pb2 as pb

from quartet_tinker import losses
from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.refusal import Refused

Ints = npt.NDArray[np.int64]

_NUMPY: dict[int, np.dtype[Any]] = {wire.DTYPE_FLOAT32: np.dtype("<f4"), wire.DTYPE_INT64: np.dtype("<i8")}


@dataclass(frozen=True)
class Datum:
    """One sequence, checked."""

    # T + 1 of them.
    tokens: Ints
    # The positions whose target is the next token.
    known_N: Ints
    # What the loss reads at these.
    inputs: dict[str, losses.Floats]

    @property
    def positions(self) -> int:
        """T: how many targets there are."""
        return len(self.tokens) - 1


def read(index: int, datum: wire.Datum, loss_fn: str) -> Datum:
    """Check one datum. Raises Refused."""
    where = f"data[{index}]"
    check_known(where, datum, *datum.model_input, *datum.loss_fn_inputs.values())
    input_T = _tokens(where, datum.model_input)
    if "target_tokens" not in datum.loss_fn_inputs:
        raise Refused(f"{where}.loss_fn_inputs has no target_tokens; give the token that follows each input")
    target_T = _array(where, "target_tokens", datum.loss_fn_inputs["target_tokens"], len(input_T), "int64")
    tokens = np.append(input_T, target_T[-1])
    if tokens.min() < 0:
        raise Refused(f"{where} has the token {tokens.min()}; token ids are 0 or more")
    given = set(datum.loss_fn_inputs) - {"target_tokens"}
    missing, odd = losses.NEEDED[loss_fn] - given, given - losses.ALLOWED[loss_fn]
    if missing or odd:
        word, names = ("needs", missing) if missing else ("does not read", odd)
        raise Refused(f"{where}.loss_fn_inputs: {loss_fn} {word} {', '.join(sorted(names))}")
    inputs = {
        name: _array(where, name, datum.loss_fn_inputs[name], len(input_T), "float32").astype(np.float64)
        for name in sorted(given)
    }
    if loss_fn == "gspo" and not inputs["sequence_ratio_mask"].any():
        raise Refused(f"{where}: sequence_ratio_mask is 0 everywhere, so there is no ratio; leave it out")
    is_next_T = target_T == tokens[1:]
    credits = [inputs[name] for name in losses.CREDIT[loss_fn] if name in inputs]
    counts_T = np.any(credits, axis=0) if credits else np.ones(len(input_T), bool)
    odd_ones = np.flatnonzero(counts_T & ~is_next_T)
    if len(odd_ones):
        at = int(odd_ones[0])
        raise Refused(
            f"{where}: target_tokens[{at}] = {target_T[at]} is not the next input token, {tokens[at + 1]}; "
            "targets that count must be the inputs shifted by one"
        )
    known_N = np.flatnonzero(is_next_T)
    return Datum(tokens, known_N, {name: array_T[known_N] for name, array_T in inputs.items()})


def check_known(where: str, *messages: Message) -> None:
    """Whether messages have only fields of tinker_wire.proto. Raises Refused."""
    for message in messages:
        unknown = UnknownFieldSet(message)
        if len(unknown):
            name = f"field {unknown[0].field_number} of {message.DESCRIPTOR.name}"
            raise Refused(f"{where} has the {name}, which is not served here (a later SDK may send it)")


def whole(datum: Datum) -> pb.TrainingSample:
    """The sample with every target covered that is known."""
    return _covering(datum, datum.known_N)


def weighted(datum: Datum, weights_N: losses.Floats) -> pb.TrainingSample:
    """The sample with the targets covered that have a weight; where none has, the last one with 0."""
    counting = np.flatnonzero(weights_N)
    if not len(counting):
        counting = np.array([len(datum.known_N) - 1])
    sample = _covering(datum, datum.known_N[counting])
    sample.advantages.extend(weights_N[counting].astype(np.float32).tolist())
    return sample


def spread(datum: Datum, values_N: losses.Floats, elsewhere: float) -> losses.Floats:
    """Values of the known positions as values of all."""
    values_T = np.full(datum.positions, elsewhere)
    values_T[datum.known_N] = values_N
    return values_T


def output(
    logprobs: Sequence[losses.Floats], elementwise: Sequence[losses.Floats], metrics: dict[str, float]
) -> bytes:
    """The answer of forward and forward_backward: two arrays for each datum."""
    record = wire.ArrayRecord(type_tag="ArrayRecord", num_datums=len(logprobs))
    for name, arrays in (("logprobs", logprobs), ("elementwise_loss", elementwise)):
        packed = [array.astype("<f4").tobytes() for array in arrays]
        offsets = np.cumsum([0, *map(len, packed)]).astype("<i8")
        record.fields[name].CopyFrom(
            wire.BatchedTensor(data=b"".join(packed), offsets=offsets.tobytes(), dtype=wire.DTYPE_FLOAT32)
        )
    result = wire.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    )
    return result.SerializeToString()


def _covering(datum: Datum, positions: Ints) -> pb.TrainingSample:
    sample = pb.TrainingSample()
    sample.sample.token_ids.extend(datum.tokens.tolist())
    for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1):
        sample.sample.spans.add(start=int(run[0]) + 1, length=len(run))
    return sample


def _tokens(where: str, chunks: Sequence[wire.Chunk]) -> Ints:
    parts = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise Refused(
                f"{where}.model_input has a chunk that is not text; images and audio are not served"
            )
        check_known(where, chunk.encoded_text)
        parts.append(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4").astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not len(tokens):
        raise Refused(f"{where}.model_input is empty; give at least one token")
    return tokens


def _array(where: str, name: str, tensor: wire.Tensor, length: int, kind: str) -> npt.NDArray[Any]:
    where = f"{where}.loss_fn_inputs[{name!r}]"
    dtype = _NUMPY.get(tensor.dtype)
    if tensor.WhichOneof("encoding") != "dense" or dtype is None or len(tensor.shape) > 1:
        raise Refused(f"{where} is no dense array of one dimension; one target for each position is served")
    # Integral weights are numbers, too; targets are never anything else than integers.
    if kind == "int64" and dtype.kind != "i":
        raise Refused(f"{where} is of {dtype.name}; token ids are int64")
    array = np.frombuffer(tensor.dense, dtype=dtype)
    if len(array) != length or (len(tensor.shape) == 1 and math.prod(tensor.shape) != length):
        raise Refused(f"{where} has {len(array)} values for {length} input tokens; give one for each")
    if not np.isfinite(array).all():
        raise Refused(f"{where} has a value that is not finite")
    return array
