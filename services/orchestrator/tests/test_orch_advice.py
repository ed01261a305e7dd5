"""Advice: said of what the metrics show, once, and in words that name what to change."""

from __future__ import annotations

from contextlib import suppress

import pytest
from orch_world import RUN, notes
from quartet.run.config import parse_run
from quartet.trainable import MAX_CALL_BYTES
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.advice import REMEMBERED, advice
from quartet_orchestrator.stability import SOON, WINDOW
from quartet_orchestrator.state import RESTING

TOML = 'model = "m"\nlearning_rate = 2e-5\nbatch_size = 64\n[[env]]\nid = "toy"\n{}'
CALM = {
    "train/reward": 0.5,
    "train/effective_sample_size": 0.95,
    "train/skipped_steps": 0.0,
    "rollout/truncated_fraction": 0.1,
    "rollout/prefix_breaks": 0.0,
    "env/toy/solved_none": 0.2,
    "env/toy/solved_all": 0.2,
    "env/toy/no_spread": 0.4,
}


def said(steps, below=""):
    return list(advice(parse_run(TOML.format(below)), steps))


def with_(**values):
    return CALM | {name.replace("__", "/"): value for name, value in values.items()}


PENALTY = "[algorithm]\noverlong_penalty = { from_tokens = 64, to_tokens = 90 }"
LIMIT = "[sampling]\nmax_tokens = {}\n"


@pytest.mark.parametrize(
    ("max_tokens", "turns", "steps", "is_told"),
    [
        (64, 1.0, WINDOW, True),
        (64, 1.0, WINDOW - 1, False),
        (64, 1.1, WINDOW, False),
        (65, 1.0, WINDOW, False),
    ],
)
def test_a_penalty_that_no_rollout_can_come_to_is_told(max_tokens, turns, steps, is_told) -> None:
    """advice.py 1 and 3: not where rollouts have several answers, or are merely shorter so far."""
    told = said([with_(rollout__turns=turns)] * steps, LIMIT.format(max_tokens) + PENALTY)
    assert bool(told) == is_told
    if is_told:
        assert "above from_tokens = 64 sampled tokens, and sampling.max_tokens ends each at 64" in told[0]
    for below in (LIMIT.format(64), PENALTY):
        assert said([with_(rollout__turns=1.0)] * WINDOW, below) == []


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"env__toy__solved_none": 0.95}, ["toy is too hard", "95%", "[difficulty_filter]"]),
        ({"env__toy__solved_all": 0.92}, ["toy has little left to teach", "92%"]),
        ({"env__toy__no_spread": 0.8}, ["80% of the groups of toy", "temperature (now 1)", "(now 8)"]),
        (
            {"env__toy__no_spread": 0.8, "env__toy__solved_all": 0.75},
            ["80% of the groups of toy", "most earn the full reward: take args for harder"],
        ),
        (
            {"env__toy__no_spread": 0.8, "env__toy__solved_none": 0.45},
            ["80% of the groups of toy", "most earn nothing: take args for easier"],
        ),
        ({"rollout__truncated_fraction": 0.6}, ["60% of the rollouts", "max_tokens (now the end of"]),
        ({"rollout__prefix_breaks": 7.0}, ["7 times a step", "chat template"]),
        ({"rollout__resampled": 24.0}, ["75% of the groups are sampled for nothing", "max_resample (now 0)"]),
        ({"train__effective_sample_size": 0.3}, ["leave 30%", "max_off_policy_steps (now 1)"]),
    ],
)
def test_each_symptom_is_told_with_what_was_seen_and_what_to_change(metrics, words) -> None:
    """advice.py 3."""
    (sentence,) = said([with_(**metrics)] * WINDOW)
    assert all(word in sentence for word in words), sentence


def test_limits_are_those_of_the_environments() -> None:
    own = "[env.sampling]\nmax_tokens = 7\n[sampling]\nmax_tokens = 5"
    (sentence,) = said([with_(rollout__truncated_fraction=0.6)] * WINDOW, own)
    assert "raise sampling.max_tokens (now 5; of toy 7), or the turns" in sentence


def test_skipped_steps_are_told_at_the_second() -> None:
    """Three in a row fail the run."""
    skipped = with_(train__skipped_steps=1.0)
    (sentence,) = said([CALM, skipped, CALM, skipped])
    assert all(word in sentence for word in ("2 optimizer steps of the last 4", "(now 2e-05)", "(now 64)"))
    assert not said([CALM, skipped, CALM]) and not said([skipped] * 3), "once is not yet; told before"


def test_a_trainer_and_an_engine_that_disagree_are_told_at_the_second() -> None:
    """stability.py 5: what rounding makes of it is none."""
    apart = with_(train__logprob_difference_mean=0.3)
    (sentence,) = said([CALM, CALM, apart, apart])
    assert "trainer and engine disagree" in sentence and "0.3 nats apart" in sentence
    assert not said([CALM, apart]) and not said([apart] * 3)
    for none in (0.05, float("nan")):
        assert not said([with_(train__logprob_difference_mean=none)] * WINDOW)


def test_a_replica_that_disagrees_alone_is_named() -> None:
    """stability.py 5: in the mean of all it is lost."""
    name = "train/logprob_difference_mean"

    def by(**replicas: float) -> dict[str, float]:
        below = "train/logprob_difference_by_replica"
        return with_() | {name: 0.05} | {f"{below}/{one}:1": value for one, value in replicas.items()}

    (sentence,) = said([by(a=0.01, b=0.01), by(a=0.01, b=0.3), by(a=0.01, b=0.5)])
    assert "tokens that b:1 sampled were 0.4 nats apart" in sentence
    assert "this replica has another base model or" in sentence
    assert not said([by(a=0.3, b=0.01), by(a=0.01, b=0.3)]), "neither in two steps"
    assert not said([by(b=0.3), by(a=0.01)]) and not said([by(a=0.01), by(a=0.01, b=0.3)])
    (sentence,) = said([by(a=0.01, **dict.fromkeys("bcdef", 0.2))] * 2)
    assert "tokens that b:1, c:1, d:1, e:1 and others sampled were 0.2 nats" in sentence
    (sentence,) = said([by(a=0.2, b=0.2) | {name: 0.2}] * 2)
    assert "log-probabilities of sampled tokens were 0.2 nats apart" in sentence, "no single one is to blame"
    (sentence,) = said([by(c=0.5, a=0.2, b=0.3, e=0.2, z=0.0, d=0.4)] * 2)
    assert "tokens that c:1, d:1, b:1, a:1 and others sampled" in sentence, "the farthest, in any order"
    # Of the others too few tokens were compared; or the mean of all is no number, which is no metric.
    alone = by(a=0.3)
    for one in (alone, {key: value for key, value in alone.items() if key != name}):
        (sentence,) = said([one] * 2)
        assert "tokens that a:1 sampled were 0.3 nats apart" in sentence


def test_experts_that_are_not_replayed_are_told_where_they_were_asked_for() -> None:
    half = [with_(train__replayed_fraction=0.5)] * WINDOW
    (sentence,) = said(half, "[algorithm]\nrouter_replay = true")
    assert "experts of 50% of the tokens" in sentence and "sampling.max_tokens" in sentence
    assert not said(half) and not said([CALM] * WINDOW, "[algorithm]\nrouter_replay = true")


def test_nothing_is_said_of_a_run_that_goes_well() -> None:
    assert not said([CALM] * REMEMBERED)


def test_a_few_steps_are_no_symptom() -> None:
    """advice.py 1."""
    cut = with_(rollout__truncated_fraction=1.0)
    assert not said([with_(rollout__truncated_fraction=0.8)] * (WINDOW - 1)), "too few steps to say"
    assert not said([CALM] * (WINDOW - 3) + [cut] * 3)
    assert said([CALM] * (WINDOW - 5) + [cut] * 5)


def test_a_symptom_is_told_when_it_begins_and_again_only_after_it_was_gone() -> None:
    """advice.py 2."""
    cut, history, told = with_(rollout__truncated_fraction=1.0), [], []
    for step in [cut] * 15 + [CALM] * 4 + [cut] * 11 + [CALM] * 30 + [cut] * 20:
        history.append(step)
        if said(history[-REMEMBERED:]):
            told.append(len(history))
    assert told == [SOON, 15 + 4 + 11 + 30 + WINDOW // 2]


def test_what_is_switched_on_already_is_not_advised() -> None:
    hard = [with_(env__toy__solved_none=1.0)] * WINDOW
    assert "[difficulty_filter]" in said(hard)[0]
    for table in ("[difficulty_filter]\nenabled = true", "[algorithm]\ndynamic_sampling = true"):
        assert "[difficulty_filter]" not in said(hard, below=table)[0]


def test_what_a_filter_replaces_is_too_easy_all_the_same() -> None:
    """Of the batch it leaves what differs."""
    learned = [with_(env__toy__solved_all=0.0) | {"env/toy/sampled/solved_all": 0.93}] * WINDOW
    (sentence,) = said(learned, below="[algorithm]\ndynamic_sampling = true")
    assert "toy has little left to teach: in 93% of its groups" in sentence


def test_of_a_foreign_trainer_nothing_is_said_about_its_training() -> None:
    falling = [CALM] * WINDOW + [with_(train__reward=0.0)] * 2
    foreign = parse_run('model = "m"\nexternal_trainer = true\n[[env]]\nid = "toy"')
    assert said(falling) and not list(advice(foreign, falling))
    assert list(advice(foreign, [with_(rollout__truncated_fraction=1.0)] * SOON)), "of its rollouts it is"


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_batch_that_grows_towards_what_a_call_carries_is_told(minibatches) -> None:
    """Of a run that came to it nothing is left but to begin another one."""
    below = f"[algorithm]\nnum_minibatches = {minibatches}\n[sampling]\nmax_tokens = 9"
    loss_tokens = minibatches * (MAX_CALL_BYTES // 2 - 3 * 1000) // 7
    for more, told in ((-200, False), (200, True)):
        tokens = {
            "train/loss_tokens": loss_tokens + more,
            "train/tokens": loss_tokens + 1000 * minibatches + more,
        }
        sentences = said([CALM | tokens] * WINDOW, below)
        assert bool(sentences) == told
    taught = below.replace("\n", '\nkl_coef = 0.1\nreference = { address = "t:1" }\n', 1)
    assert "carries 79% of what it may" in said([CALM | tokens] * WINDOW, taught)[0]
    assert "carries 50% of what it may" in sentences[0]
    assert sentences[0].endswith(
        "batch_size (now 64) or sampling.max_tokens (now 9), or a higher algorithm.num_minibatches "
        f"(now {minibatches})"
    )


def test_an_environment_that_most_batches_lack_is_not_judged() -> None:
    without = {name: value for name, value in CALM.items() if not name.startswith("env/")}
    rare = [with_(env__toy__solved_none=1.0)] * 4 + [without] * 6
    assert not said(rare)


@pytest.mark.parametrize(
    ("table", "judged"),
    [
        ('advantage = "none"', ["too hard"]),
        ('preset = "sft"', ["too hard"]),
        ('preset = "opd"\nreference = { model = "teacher" }', []),
        ('advantage = "rloo"', ["too hard", "rewards are equal"]),
    ],
)
def test_rewards_are_judged_as_far_as_they_are_learned_from(table, judged) -> None:
    """advice.py 4."""
    seen = [with_(env__toy__solved_none=1.0)] * WINDOW, [with_(env__toy__no_spread=1.0)] * WINDOW
    found = [sentence for steps in seen for sentence in said(steps, f"[algorithm]\n{table}")]
    assert len(found) == len(judged)
    assert all(words in sentence for words, sentence in zip(judged, found, strict=True)), found


async def test_a_run_is_told_once_over_restarts(world):
    """advice.py 2, invariant 9: what was told is remembered by the metrics in the journal."""
    world.host.flat_tasks = set(range(50))
    world.trainer.delay_s = 0.01
    run, restarts = pb.Run(), 0
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, world.toml(steps=WINDOW + 4, evals=0), dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=0.1 * (1 + restarts / 10))
            if run.phase in RESTING:
                told = await notes(runs)
            restarts += run.phase not in RESTING
    assert restarts >= 2
    assert len([note for note in told if "has little left to teach: in 100%" in note]) == 1


async def test_an_evaluation_that_fell_is_told(world, monkeypatch):
    plain = world.host._rollout

    def by_version(request, member):
        rollout = plain(request, member)
        if request.split == epb.SPLIT_EVAL:
            rollout.reward = 1.0 if world.trainer.latest[request.run_id] == 0 else 0.1
        return rollout

    monkeypatch.setattr(world.host, "_rollout", by_version)
    async with world.orchestrator() as runs:
        # Of four rollouts a fall from all to none would be noise.
        await runs.submit(RUN, world.toml(steps=2, evals=6), dry_run=False)
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_COMPLETED
        (told,) = [note for note in await notes(runs) if "the evaluation fell" in note]
    assert told.startswith(
        "the evaluation fell from 1 after 0 steps to 0.1 after 2: training makes the model"
    )
