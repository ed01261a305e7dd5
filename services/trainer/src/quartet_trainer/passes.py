"""Passes of samples through the model, micro-batch by micro-batch: to train on them, or to score them.

1. Micro-batches follow from the samples alone and come in one order: equal calls give equal bits.
2. Scoring under other weights than the live ones touches neither the model nor its gradients.
3. `progress` is called after every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from quartet.errors import QuartetError
from torch import Tensor

from quartet_trainer.batch import Bools, Columns, highest
from quartet_trainer.head import Measure
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.loss import token_losses
from quartet_trainer.loss.own_metrics import OwnMetrics
from quartet_trainer.machine import Machine
from quartet_trainer.model import max_positions, vocab_size
from quartet_trainer.one_pass import Pass
from quartet_trainer.packing import MicroBatch, cost_of_one_more, cut, rows_of
from quartet_trainer.publish import Snapshot
from quartet_trainer.replay import Replay
from quartet_trainer.routing import Routing
from quartet_trainer.sample import Floats, Sample, check_against_model
from quartet_trainer.spec import LossSpec
from quartet_trainer.trained import replaced

#: How a model is made to be a version, or to be as it is.
Standing = Callable[[Snapshot | None], AbstractContextManager[Mapping[str, Tensor]]]


class Scores(NamedTuple):
    """Of the covered positions of a sample."""

    logprobs: Floats
    #: 1 where the token is the most likely one, else 0.
    best: Floats


class Passes:
    """One model's passes."""

    def __init__(
        self,
        policy: PolicyForward,
        machine: Machine,
        budget_tokens: int,
        progress: Callable[[], None],
        standing: Standing = replaced,
    ) -> None:
        """`standing` makes the model stand as a version while samples are scored."""
        self._policy, self._machine, self._standing = policy, machine, standing
        self._budget_tokens, self._progress = budget_tokens, progress
        self._routing = Routing(policy.model)
        self.replay = Replay(policy.model)
        self._row_tokens = policy.shared_tokens(machine.row_tokens)
        self._max_positions = max_positions(policy.model)
        self._cost_tokens = cost_of_one_more(budget_tokens, accelerated=machine.device.type != "cpu")

    def check(self, samples: Sequence[Sample], model: str = "the model") -> None:
        """Whether the model, called so by errors, has these tokens and positions. Errors: INVALID_REQUEST."""
        check_against_model(samples, vocab_size(self._policy.model), self._max_positions, model)

    def train(self, samples: Sequence[Sample], columns: Columns, loss: LossSpec, normalizer: float) -> Pass:
        """Forward and backward; the gradients are left on the parameters.

        Errors: those of a loss of one's own.
        """
        done = Pass.over(samples)
        done.own = OwnMetrics() if loss.custom else None
        refused: QuartetError | None = None
        self._routing.begin()
        always = loss.moves_without_advantage
        moving = [index for index, weight in enumerate(columns.advantages) if always or weight.any()]
        still = sorted(set(range(len(samples))) - set(moving))
        for members, learns in ((moving, True), (still, False)):
            # Where every weight is zero so is the gradient: the forward pass alone gives the diagnostics.
            for batch in self._pack(samples, members):
                # Around the backward pass, too, in which layers may be computed anew.
                with self.replay.replaying(batch, self._machine.device):
                    with torch.set_grad_enabled(learns), self._routing.watched(batch.present_T):
                        logp_K, entropy_K = self._policy(
                            batch, loss.temperature, entropy_learns=loss.entropy_coef != 0
                        )
                        # Zero of nothing has a backward pass, too, which meets those of the other ranks.
                        total = 0.0 * logp_K.sum()
                        if batch.members and refused is None:
                            tokens = columns.tokens(batch.members, logp_K, entropy_K)
                            try:
                                losses_K = token_losses(loss, tokens, self._machine.losses, done.own)
                                total = losses_K.sum() / normalizer
                            except QuartetError as error:
                                # A loss of one's own; other ranks may know nothing of it and go on.
                                refused = error
                    if learns:
                        torch.autograd.backward(total)
                done.loss += float(total.detach())
                done.keep(samples, batch.members, logp_K.detach(), entropy_K.detach())
                self._progress()
        self._machine.ranks.settle(refused)
        done.routing = self._routing.table()
        self._machine.ranks.join(done, [len(sample.covered_K) for sample in samples])
        return done

    def score(
        self,
        samples: Sequence[Sample],
        weights: Snapshot | None,
        temperature: float,
        full_precision: bool = True,
    ) -> list[Floats]:
        """Log-probabilities of the covered positions of each sample; weights None: the live ones.

        Other weights compute in float32, or without full_precision as the live ones do.
        """
        return self._scored(samples, weights, temperature, full_precision).logprobs

    def judge(self, samples: Sequence[Sample], weights: Snapshot | None, temperature: float) -> list[Scores]:
        """As `score`, with what is the most likely."""
        done = self._scored(samples, weights, temperature, full_precision=True, measure="best")
        return list(map(Scores, done.logprobs, done.measured))

    def most_uncertain(self, samples: Sequence[Sample], loss: LossSpec) -> list[Bools] | None:
        """Which covered positions are among those of the highest entropy by the live weights, of all samples
        together; None where the loss does not ask."""
        if loss.top_entropy_quantile is None:
            return None
        entropies = self._scored(samples, None, loss.temperature, full_precision=False).measured
        return highest(entropies, loss.top_entropy_quantile)

    def _scored(
        self,
        samples: Sequence[Sample],
        weights: Snapshot | None,
        temperature: float,
        full_precision: bool,
        measure: Measure = "entropy",
    ) -> Pass:
        done = Pass.over(samples)
        with torch.no_grad(), self._standing(weights) as placed:
            scoring = (
                nullcontext(self._policy)
                if weights is None
                else self._policy.standing_as(placed, full_precision)
            )
            with scoring as score:
                for batch in self._pack(samples, range(len(samples))):
                    with self.replay.replaying(batch, self._machine.device):
                        wide = weights is not None and full_precision
                        output = score(batch, temperature, full_precision=wide, measure=measure)
                    done.keep(samples, batch.members, *output)
                    self._progress()
        self._machine.ranks.join(done, [len(sample.covered_K) for sample in samples])
        return done

    def _pack(self, samples: Sequence[Sample], members: Sequence[int]) -> list[MicroBatch]:
        ranks = self._machine.ranks
        rows = rows_of(samples, members, self._row_tokens)
        mine = ranks.mine(rows, self._policy.width)
        batches = cut(
            samples, mine, self._budget_tokens, self._row_tokens, self._cost_tokens, self._max_positions
        )
        # As padding it is a token like others: of one that a model embeds as zero a norm has no gradient.
        filling = int(samples[rows[0].members[0]].tokens_T[0]) if rows else 0
        return ranks.even(batches, filling)
