"""Packing: ragged samples become rectangular micro-batches, with no attention across samples.

1. Samples with an equal prompt, whose tokens went to equal experts where these are told, share it (the
   members of a group): a row is the prompt once, then their tails,
   each tail seeing the prompt and itself only, at the positions it would have alone. Log-probabilities and
   gradients equal those of separate rows.
2. Every covered position of every sample is predicted exactly once.
3. Rows are sorted by length, and a micro-batch has at most `budget_tokens` tokens, padding included, unless
   one row alone has more; of these at most so many are padding as one more micro-batch costs, besides what
   5 adds.
4. Rows that samples share are at most `row_tokens` wide, and no longer ones stand beside them: a mask, where
   attention needs one, stays small however long samples are.
5. Rows are padded to one of SIZES_PER_DOUBLING sizes between a length and its double (`padded`), so that
   shapes come again: matrix libraries prepare each new one, and memory of a new size is new memory. Never
   beyond the budget, nor beyond the positions that the model has.
6. Pure and deterministic: equal samples give equal micro-batches.

Measured on one thread of a 2-core CPU: a 0.63 M model, 16 prompts of 22 tokens x 8 tails of 11, forward and
backward: 0.28 CPU s as 128 padded rows, 2.0 s as one row of 4,224 tokens under a block-diagonal mask, 0.125 s
as 16 rows that share their prompt. Batches of the main job, cut where padding exceeds
MICROBATCH_COST_TOKENS: 12% less than in one piece.

Shapes: R rows, L padded length, K covered positions of the micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quartet_trainer.sample import Experts, Ints, Sample

#: What one more micro-batch costs on a CPU, in tokens computed: padding beyond it is worse.
MICROBATCH_COST_TOKENS = 128
#: The same on an accelerator, whose kernels wait for each other and whose ranks gather every layer again: a
#: share of the budget.
ACCELERATOR_COST_SHARE = 1 / 8
#: A shorter common prompt saves less than the longer row costs.
MIN_SHARED_TOKENS = 8
#: At most a sixteenth is padding for it, in the mean a fortieth.
SIZES_PER_DOUBLING = 16
#: Segment numbers: the shared prompt of a row is 0, tails count from 1.
PROMPT = 0
PADDING = -1


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts take the tokens of all rows, one row after the other, as far as it is told."""

    experts_TNk: Experts
    told_T: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Whole:
    """The micro-batch that others have parts of: W columns, of which every rank has L (ranks/context.py)."""

    segments_RW: Ints
    position_ids_RW: Ints
    # Which of its covered positions are predicted in this part, and how many there are.
    own_k: Ints
    covered: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass."""

    token_ids_RL: Ints
    position_ids_RL: Ints
    segments_RL: Ints
    # Whether some row holds several segments, so that a causal mask alone is not enough.
    needs_mask: bool
    # Flat index (row * L + column) of the position whose output predicts each covered token, and that token.
    predictors_K: Ints
    targets_K: Ints
    # The samples in it, in order; their covered positions follow each other in the K axis.
    members: tuple[int, ...]
    # None: the routers choose for all of them.
    routes: Routes | None = None
    # Where columns, predictors and targets are a part of them.
    whole: Whole | None = None

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return int(self.token_ids_RL.size)

    @property
    def present_T(self) -> npt.NDArray[np.bool_]:
        """Which of them are no padding, row after row."""
        return np.not_equal(self.segments_RL, PADDING).reshape(-1)


@dataclass(frozen=True, slots=True)
class Row:
    """One sample, or several behind the prompt that they share."""

    prompt_length: int  # 0: one sample alone
    members: tuple[int, ...]
    length: int


def pack(
    samples: Sequence[Sample], members: Sequence[int], budget_tokens: int, row_tokens: int
) -> list[MicroBatch]:
    """Pack the samples numbered in `members`; those that cover nothing are left out."""
    return cut(samples, rows_of(samples, members, row_tokens), budget_tokens, row_tokens)


def cut(
    samples: Sequence[Sample],
    rows: Sequence[Row],
    budget_tokens: int,
    row_tokens: int,
    cost_tokens: int = MICROBATCH_COST_TOKENS,
    max_positions: int = sys.maxsize,
) -> list[MicroBatch]:
    """Micro-batches of rows; one more of them costs as much as so many tokens.

    No row is longer than `max_positions`.
    """
    most = min(budget_tokens, max_positions)
    rows = sorted(rows, key=lambda row: row.length)
    batches: list[MicroBatch] = []
    pending: list[Row] = []
    held = 0
    for row in rows:
        width = _width(row, row_tokens, most)
        computed = (len(pending) + 1) * width
        padding = computed - held - width
        # Rows that share a prompt have at most row_tokens: no longer one joins them, and their mask.
        if pending and (
            computed > budget_tokens or padding > cost_tokens or pending[-1].length <= row_tokens < row.length
        ):
            batches.append(_lay_out(samples, pending, _width(pending[-1], row_tokens, most)))
            pending, held = [], 0
        pending.append(row)
        held += width
    if pending:
        batches.append(_lay_out(samples, pending, _width(pending[-1], row_tokens, most)))
    return batches


def padded(count: int) -> int:
    """The least of the sizes that holds so many."""
    step = max(1, (1 << max(1, count).bit_length() - 1) // SIZES_PER_DOUBLING)
    return -(-count // step) * step


def _width(row: Row, row_tokens: int, most: int) -> int:
    """Columns of a row; those of at most row_tokens stay within them."""
    limit = min(row_tokens, most) if row.length <= row_tokens else most
    return max(row.length, min(padded(row.length), limit))


def cost_of_one_more(budget_tokens: int, *, accelerated: bool) -> int:
    """What one more micro-batch costs, in tokens."""
    share = int(ACCELERATOR_COST_SHARE * budget_tokens) if accelerated else 0
    return max(MICROBATCH_COST_TOKENS, share)


def rows_of(samples: Sequence[Sample], members: Sequence[int], row_tokens: int) -> list[Row]:
    """Rows of the samples numbered in `members`."""
    by_prompt: dict[tuple[bytes, bytes], list[int]] = {}
    rows: list[Row] = []
    for member in members:
        sample = samples[member]
        if not sample.is_covered:
            continue
        if sample.prompt_length < MIN_SHARED_TOKENS:
            rows.append(Row(0, (member,), sample.input_length))
            continue
        prompt = sample.tokens_T[: sample.prompt_length].tobytes()
        told = b"" if sample.experts_TNk is None else sample.experts_TNk[: sample.prompt_length].tobytes()
        by_prompt.setdefault((prompt, told), []).append(member)
    for group in by_prompt.values():
        rows.extend(_shared_rows(samples, group, row_tokens))
    return rows


def _shared_rows(samples: Sequence[Sample], group: Sequence[int], row_tokens: int) -> list[Row]:
    prompt_length = samples[group[0]].prompt_length
    rows: list[Row] = []
    held: list[int] = []
    length = prompt_length
    for member in group:
        tail = samples[member].input_length - prompt_length
        if held and length + tail > row_tokens:
            rows.append(Row(prompt_length, tuple(held), length))
            held, length = [], prompt_length
        held.append(member)
        length += tail
    rows.append(Row(prompt_length, tuple(held), length))
    return [row if len(row.members) > 1 else Row(0, row.members, row.length) for row in rows]


def _lay_out(samples: Sequence[Sample], rows: Sequence[Row], width: int) -> MicroBatch:
    token_ids_RL = np.zeros((len(rows), width), dtype=np.int64)
    needs_mask = any(row.prompt_length > 0 for row in rows)
    # Nobody reads what padding gives, but its position must be a valid one. Where no row is masked it goes on
    # counting: a model takes a jump for the border of two sequences, and would build a mask of its own.
    position_ids_RL = np.zeros_like(token_ids_RL)
    if not needs_mask:
        position_ids_RL[:] = np.arange(width)
    segments_RL = np.full_like(token_ids_RL, PADDING)
    routes = _room_for_routes(samples, rows, width)
    predictors: list[Ints] = []
    for number, row in enumerate(rows):
        shared = row.prompt_length
        if shared:
            token_ids_RL[number, :shared] = samples[row.members[0]].tokens_T[:shared]
            position_ids_RL[number, :shared] = np.arange(shared)
            segments_RL[number, :shared] = PROMPT
            _route(samples[row.members[0]], 0, shared, routes, number * width)
        column = shared
        for segment, member in enumerate(row.members, start=1):
            sample = samples[member]
            tail = sample.tokens_T[shared : sample.input_length]
            where = slice(column, column + len(tail))
            token_ids_RL[number, where] = tail
            position_ids_RL[number, where] = np.arange(shared, sample.input_length)
            segments_RL[number, where] = segment
            _route(sample, shared, sample.input_length, routes, number * width + column)
            before = sample.covered_K - 1
            predictors.append(number * width + np.where(before < shared, before, before - shared + column))
            column += len(tail)
        # Padding is a token like others: of one that a model embeds as zero a norm has no gradient.
        token_ids_RL[number, column:] = token_ids_RL[number, column - 1]
    members = tuple(member for row in rows for member in row.members)
    targets = [samples[member].tokens_T[samples[member].covered_K] for member in members]
    return MicroBatch(
        token_ids_RL,
        position_ids_RL,
        segments_RL,
        needs_mask,
        np.concatenate(predictors),
        np.concatenate(targets),
        members,
        routes,
    )


def _room_for_routes(samples: Sequence[Sample], rows: Sequence[Row], width: int) -> Routes | None:
    every = (samples[member].experts_TNk for row in rows for member in row.members)
    told = [one for one in every if one is not None]
    if not told:
        return None
    tokens, dtype = len(rows) * width, np.result_type(*{one.dtype for one in told})
    return Routes(np.zeros((tokens, *told[0].shape[1:]), dtype), np.zeros(tokens, np.bool_))


def _route(sample: Sample, begin: int, end: int, routes: Routes | None, at: int) -> None:
    """Lay the experts of the tokens begin..end of a sample from a place on."""
    if routes is not None and sample.experts_TNk is not None:
        told_TNk = sample.experts_TNk[begin:end]
        where = slice(at, at + len(told_TNk))
        routes.experts_TNk[where] = told_TNk
        routes.told_T[where] = True
