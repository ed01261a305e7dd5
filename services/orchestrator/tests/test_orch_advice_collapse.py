"""Advice on runs that go badly, and none on runs that go well: numbers of real runs of small models."""

from __future__ import annotations

import random

import pytest
from quartet.run.config import parse_run
from quartet_orchestrator.advice import REMEMBERED, advice
from quartet_orchestrator.stability import JUMP, REWARD, SOON, WINDOW, compared, evaluation_fell

TOML = (
    'model = "m"\nlearning_rate = 1e-3\nbatch_size = 64\n{}[[env]]\nid = "letters"\n[[env]]\nid = "reverse"\n'
)

# A whole model at 1e-3: fit for a tenth of that. Of letters nothing is left, of reverse a half.
COLLAPSE = {
    "train/reward": (
        *(0.358, 0.404, 0.294, 0.223, 0.227, 0.244, 0.183, 0.179, 0.138, 0.173),
        *(0.148, 0.125, 0.134, 0.157, 0.118, 0.113, 0.105, 0.138, 0.0533, 0.123),
    ),
    "train/reward_std": (
        *(0.341, 0.401, 0.397, 0.388, 0.395, 0.424, 0.321, 0.319, 0.258, 0.303),
        *(0.267, 0.236, 0.238, 0.275, 0.218, 0.241, 0.208, 0.23, 0.121, 0.198),
    ),
    "train/mismatch_kl": (0.0, 0.0686, 0.614, 1.35, 0.875, 0.249, 0.0315, 0.0107, 0.0124, *[0.01] * 11),
    "train/effective_sample_size": (1.0, 0.953, 0.198, 0.0166, 0.0216, 0.428, 0.938, *[0.98] * 13),
    "staleness/mean": (0.0, 1.0, 0.958, 1.0, 0.907, *[1.0] * 15),
    "rollout/truncated_fraction": (0.0312, 0.0312, 0.0469, 0.547, 0.688, *[0.75] * 15),
    "env/letters/reward": (0.172, 0.208, 0.0729, *[0.0] * 17),
    "env/letters/solved_none": (0.0, 0.0, 0.167, *[1.0] * 17),
    "env/letters/no_spread": (0.167, 0.0, 0.167, *[1.0] * 17),
}
# A rate 100 times too high.
GONE = {
    "train/reward": (0.361, 0.344, *[0.0] * 22),
    "train/reward_std": (0.32, 0.394, *[0.0] * 22),
    "train/mismatch_kl": (0.0, 6.77, 3.34, 0.0765, 0.18, 0.0489, 0.0247, *[0.004] * 17),
    "train/effective_sample_size": (1.0, 0.00213, 0.0108, 0.784, 0.754, 0.936, 0.966, *[0.99] * 17),
    "staleness/mean": (0.0, *[1.0] * 23),
    "rollout/truncated_fraction": (0.0, 0.0625, 0.312, 0.844, 0.781, 0.906, 0.969, *[1.0] * 17),
    "env/letters/reward": (0.208, 0.125, *[0.0] * 22),
    "env/letters/solved_none": (0.0, 0.0, *[1.0] * 22),
    "env/letters/no_spread": (0.333, 0.0, *[1.0] * 22),
    "env/reverse/reward": (0.82, 1.0, *[0.0] * 22),
    "env/reverse/solved_none": (0.0, 0.0, *[1.0] * 22),
    "env/reverse/no_spread": (0.0, *[1.0] * 23),
}
# The demo, which reaches 0.98: in one step a few tokens carry most of the weight.
DEMO = {
    "train/reward": (
        *(0.343, 0.429, 0.433, 0.532, 0.698, 0.75, 0.861, 0.873, 0.947),
        *(0.961, 0.983, 0.983, 0.963, 0.981, 0.97, 0.979, 0.984, 0.99),
    ),
    "train/reward_std": (0.198, 0.212, 0.193, 0.18, 0.171, 0.165, 0.175, 0.193, 0.126, 0.117, *[0.07] * 8),
    "train/mismatch_kl": (0.0, 0.0259, 0.0716, 0.164, 0.0761, 0.148, 0.0376, 0.0609, 0.005, *[0.002] * 9),
    "train/effective_sample_size": (1.0, 0.955, 0.87, 0.72, 0.837, 0.325, 0.93, 0.965, *[0.99] * 10),
    "staleness/mean": (0.0, *[1.0] * 17),
    "rollout/truncated_fraction": (0.0,) * 18,
    "env/reverse/reward": (0.343, 0.429, 0.433, 0.532, 0.698, 0.75, 0.861, 0.873, 0.947, *[0.97] * 9),
    "env/reverse/solved_none": (0.0,) * 18,
    "env/reverse/solved_all": (*[0.0] * 8, 0.438, 0.375, 0.5, 0.562, 0.188, 0.562, 0.438, 0.5, 0.5, 0.562),
    "env/reverse/no_spread": (*[0.0] * 8, 0.438, 0.375, 0.5, 0.562, 0.188, 0.562, 0.438, 0.5, 0.5, 0.562),
}


def told(run, keys="", **instead):
    """What is said of the run, each with the number of steps that were applied."""
    run = run | {name.replace("__", "/"): values for name, values in instead.items()}
    steps = [dict(zip(run, values, strict=True)) for values in zip(*run.values(), strict=True)]
    config = parse_run(TOML.format(keys))
    ends = range(1, len(steps) + 1)
    return [(end, one) for end in ends for one in advice(config, steps[max(0, end - REMEMBERED) : end])]


def rewards(*values, std=0.35):
    return {"train/reward": values, "train/reward_std": (std,) * len(values)}


def test_a_collapse_is_told_by_its_cause_while_it_happens() -> None:
    """stability.py 1, 2, 4: and neither too hard, nor all alike, nor cut by a limit."""
    (at_jump, jump), (at_fall, fall) = told(COLLAPSE)
    assert (at_jump, at_fall) == (4, 10)
    assert jump.startswith("training is not stable: in the last 2 steps the policy was 0.98 nats")
    assert "left 11% of the tokens' worth" in jump and "lower learning_rate (now 0.001)" in jump
    assert fall.startswith("the mean reward fell from 0.352 at its best to 0.163 in the last 3 steps")
    assert "lower learning_rate (now 0.001)" in fall


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("", "or max_grad_norm (now 1), raise"),
        ("max_grad_norm = 0\n", "(now 0.001), set max_grad_norm (now 0: never), raise"),
        ("", "or hold the policy with [kl_penalty]"),
        ("kl_penalty = { enabled = true, beta = 0.2 }\n", "by a larger kl_penalty.beta (now 0.2)"),
        ("algorithm = { kl_coef = 0.2 }\n", "by a larger algorithm.kl_coef (now 0.2)"),
        ("kl_penalty = { enabled = true, target_kl = 0.01 }\n", "a lower kl_penalty.target_kl (now 0.01)"),
        ("algorithm = { kl_coef = 0.2, target_kl = 0.05 }\n", "a lower algorithm.target_kl (now 0.05)"),
    ],
)
def test_what_would_hold_the_policy_is_told_as_the_run_has_it(keys: str, said: str) -> None:
    """advice.py 3: a run that has a penalty is not told to take one."""
    (_, jump), (_, fall) = told(COLLAPSE, keys)
    assert said in jump and said in fall


def test_of_a_reward_that_is_gone_at_once_instability_is_told_first_and_alone() -> None:
    """stability.py 1, 2, 4."""
    (at_jump, jump), (at_fall, fall) = told(GONE)
    assert (at_jump, at_fall) == (3, 6)
    assert "5.1 nats" in jump and "left 1%" in jump
    assert "fell from 0.235 at its best to 0 in the last 3" in fall


def test_where_every_step_is_on_policy_the_fall_alone_tells_it() -> None:
    """stability.py 4: and the cutting, which may be what made the reward fall."""
    none, all_of_it = (0.0,) * 24, (1.0,) * 24
    same = {"train__mismatch_kl": none, "train__effective_sample_size": all_of_it, "staleness__mean": none}
    (at_fall, fall), (at_cut, cut) = told(GONE, "max_off_policy_steps = 0\n", **same)
    assert (at_fall, at_cut) == (6, 10)
    assert "the mean reward fell" in fall and "were cut by a limit" in cut


def test_what_follows_from_a_collapse_is_told_where_the_reward_never_was_there() -> None:
    """stability.py 4."""
    nothing = GONE | {name: (0.0,) * 24 for name in GONE if name.endswith(("/reward", "/reward_std"))}
    nothing |= {name: (1.0,) * 24 for name in GONE if name.endswith(("/solved_none", "/no_spread"))}
    uncut = nothing | {"rollout/truncated_fraction": (0.0,) * 24}
    assert [one.split(" as it is")[0] for at, one in told(uncut) if at == WINDOW] == [
        "letters is too hard",
        "reverse is too hard",
    ]


def test_that_everything_is_cut_is_told_after_three_steps_and_not_that_it_is_too_hard() -> None:
    """advice.py 1, 5."""
    ones, zeros = (1.0,) * 14, (0.0,) * 14
    cut = rewards(*zeros, std=0.0) | {
        "rollout/truncated_fraction": ones,
        "env/letters/reward": zeros,
        "env/letters/solved_none": ones,
        "env/letters/no_spread": ones,
    }
    ((at, sentence),) = told(cut)
    assert at == SOON and sentence.startswith(
        "100% of the rollouts were cut by a limit; raise sampling.max_tok"
    )
    ((at, sentence),) = told(cut, rollout__truncated_fraction=(0.03,) * 14)
    assert at == WINDOW and sentence.startswith("letters is too hard as it is")
    mended = told(cut, rollout__truncated_fraction=(*[1.0] * 5, *[0.0] * 9))
    assert [at for at, _ in mended] == [SOON, WINDOW], "the one while it is so, the other once it can be seen"


def test_a_very_low_effective_sample_size_is_told_at_the_second_step() -> None:
    sizes = (1.0, 0.9, 0.06, 0.9, 0.05, 0.07, 0.9)
    assert not told(rewards(0.4) | {"train/effective_sample_size": (0.05,)}), "a single token does it"
    ((at, sentence),) = told(rewards(*[0.4] * 7) | {"train/effective_sample_size": sizes})
    assert at == 6 and "importance weights leave 6% of the tokens' worth" in sentence


def test_a_jump_is_measured_for_each_step_of_staleness() -> None:
    """stability.py 1. Of a run 8 steps behind, which learns: a mean of 0.42, at most 1.34."""
    behind = rewards(*[0.4] * 6) | {"train/mismatch_kl": (0.0, 0.3, 0.4, 1.34, 1.2, 0.4)}
    keys = "max_off_policy_steps = 8\n"
    assert not told(behind | {"staleness/mean": (0.0, 3.0, 7.0, 8.0, 8.0, 8.0)}, keys)
    ((at, sentence),) = told(behind | {"staleness/mean": (0.0, *[2.0] * 5)}, keys)
    assert at == 5 and sentence.endswith("or lower max_off_policy_steps (now 8)")
    assert not told(behind | {"staleness/mean": (0.0,) * 6}), "an engine that computes otherwise"
    several = "[algorithm]\nnum_minibatches = 2\n"
    assert told(behind | {"staleness/mean": (0.0,) * 6}, several), "the second step of a batch is off-policy"
    at_bound = rewards(*[0.4] * 4) | {"train/mismatch_kl": (0.0, JUMP, JUMP, 0.0)}
    ((at, _),) = told(at_bound | {"staleness/mean": (0.0, 1.0, 0.5, 1.0)})
    assert at == 3, "a part of a step behind is one"


@pytest.mark.parametrize(
    "run",
    [
        DEMO,
        rewards(0.42, 0.38, 0.42, 0.42, 0.45, 0.42, 0.43, 0.42, 0.39, 0.42, 0.45, 0.44, 0.42, 0.46, 0.44),
        rewards(0.227, 0.191, 0.188, 0.234, 0.281, 0.258, 0.195, 0.203, 0.25, 0.242, 0.18, 0.211, std=0.25),
        rewards(*[0.0] * 6, 0.016, 0.0, 0.031, 0.0, 0.0, 0.0, 0.047, 0.016, 0.062, 0.12, 0.2, std=0.15),
        rewards(*[0.2 + at / 200 for at in range(60)]),
        rewards(*[0.5] * 12, 0.1, *[0.5] * 12),
        rewards(-0.2, -0.2, -0.2, -0.9, -0.9, -0.9),
    ],
    ids=["demo", "flat", "noise", "from zero", "slow rise", "one bad batch", "below zero"],
)
def test_of_a_run_that_goes_well_nothing_is_told(run) -> None:
    assert not told(run)


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.4])
def test_noise_is_no_fall(chance) -> None:
    """stability.py 2: rewards of 0 and 1, 64 a step, of tasks that are either mostly solved or mostly not."""
    draw = random.Random(7)
    for _ in range(3):
        steps = []
        for _ in range(120):
            tasks = [draw.betavariate(chance * 2, (1 - chance) * 2) for _ in range(8)]
            solved = sum(draw.random() < task for task in tasks for _ in range(8)) / 64
            steps.append((solved, (solved - solved**2) ** 0.5))
        means, deviations = zip(*steps, strict=True)
        assert not told({"train/reward": means, "train/reward_std": deviations})


def test_a_fall_is_measured_from_the_best_and_told_once() -> None:
    """stability.py 2: a slow one, of which no ten steps show a half."""
    slow = [0.6 - at / 80 for at in range(48)]
    ((at, sentence),) = told(rewards(*[0.6] * 10, *slow))
    assert at == 37 and "fell from 0.6 at its best to 0.2" in sentence


def evaluated(*means, rollouts=40.0, std=0.4):
    return {
        10 * at: {"eval/reward": mean, "eval/reward_std": std, "eval/rollouts": rollouts}
        for at, mean in enumerate(means)
    }


def said_of(evaluations):
    return evaluation_fell(parse_run(TOML.format("")), evaluations)


def test_an_evaluation_that_fell_is_told_once() -> None:
    """stability.py 3."""
    sentence = said_of(evaluated(0.561, 0.296, std=0.36))
    assert sentence.startswith("the evaluation fell from 0.561 after 0 steps to 0.296 after 10")
    assert "learning_rate (now 0.001)" in sentence and "--best" not in sentence, (
        "the best is what it began with"
    )
    assert said_of(evaluated(0.561, 0.296, 0.207, std=0.36)) is None, "told before"
    later = said_of(evaluated(0.5, 0.7, 0.1))
    assert "from 0.7 after 10 steps to 0.1 after 20" in later
    assert later.endswith("quartet export --best takes the best model that is kept")
    assert "to 0.1 after 30" in said_of(evaluated(0.5, 0.1, 0.5, 0.1)), "again after it was gone"
    backwards = dict(reversed(evaluated(0.5, 0.7, 0.1).items()))
    assert said_of(backwards) == later, "by their steps, in whatever order they come"
    foreign = parse_run(TOML.replace("learning_rate = 1e-3", "external_trainer = true").format(""))
    assert evaluation_fell(foreign, evaluated(0.5, 0.7, 0.1)) is None


def test_an_evaluation_that_may_be_noise_is_not_told() -> None:
    """stability.py 3."""
    assert said_of({}) is None and said_of(evaluated(0.5)) is None
    assert said_of(evaluated(0.3, 0.42, 0.25)) is None, "of 40 rollouts"
    assert said_of(evaluated(0.6, 0.41, rollouts=4000.0)) is None, "a third is not lost"
    assert said_of(evaluated(0.15, 0.3)) is None and said_of(evaluated(-0.2, -0.9)) is None
    few = evaluated(1.0, 0.0, rollouts=2.0, std=0.0)
    assert said_of(few) is None, "as one coin in 16 falls; few that are alike are no measure of their spread"
    assert said_of(evaluated(1.0, 0.0, rollouts=16.0, std=0.0)) is not None
    lost = evaluated(0.561, 0.207) | {20: {"eval/coverage": 0.0}}
    assert said_of(lost) is None, "of one without a result there is nothing to say"


@pytest.mark.parametrize("seed", range(3))
def test_a_few_evaluations_of_any_number_say_whether_the_last_one_fell(seed) -> None:
    """stability.py 3; with thousands, to read all after each of them would take longer than some measure."""
    chance, found = random.Random(seed), set()
    for _ in range(60):
        all_of_them = evaluated(*(chance.choice((0.1, 0.5, 0.5, 0.7)) for _ in range(chance.randint(1, 12))))
        for step in all_of_them:
            if chance.random() < 0.1:
                all_of_them[step] = {"eval/coverage": 0.0}
        few = compared({step: one.get(REWARD) for step, one in all_of_them.items()})
        said = said_of(all_of_them)
        assert len(few) <= 5 and said == said_of({step: all_of_them[step] for step in few}), all_of_them
        found.add(said is None)
    assert found == {True, False}
