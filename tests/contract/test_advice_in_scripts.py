"""What the orchestrator advises, said in a script: no line keeps a word that only a run's file has."""

from __future__ import annotations

import re

import pytest
from quartet.grpo.advised import by_arguments
from quartet.grpo.arguments import GRPOConfig as OfVerifiers
from quartet.grpo.trainer import ADVISED as OF_VERIFIERS
from quartet.run.config import RunConfig, parse_run
from quartet.trl.advised import ADVISED as OF_TRL
from quartet.trl.advised import advised
from quartet.trl.arguments import GRPOConfig as OfTrl
from quartet.trl.translate import ENVIRONMENT
from quartet_orchestrator.advice import advice
from quartet_orchestrator.stability import WINDOW

TOML = f"""
model = "m"
max_off_policy_steps = 2
{{more}}
[sampling]
max_tokens = 64
[[env]]
id = "{ENVIRONMENT}"
"""
FILTER = "difficulty_filter = { enabled = true }"
BETA = "algorithm = { kl_coef = 0.02 }"
PENALTY = "algorithm = { overlong_penalty = { from_tokens = 64, to_tokens = 90 } }"
#: What is seen, of which run, and what a script of TRL is told of it.
SEEN = [
    ({"solved_all": 1.0}, "", "train_dataset has little left to teach"),
    (
        {"solved_all": 1.0},
        "",
        'args.overrides = {"difficulty_filter": {"enabled": True}} replaces such groups',
    ),
    ({"solved_none": 1.0}, "", "give easier examples in train_dataset, a larger model, an SFTTrainer before"),
    ({"no_spread": 0.8, "solved_all": 0.7}, "", "give harder examples in train_dataset; "),
    ({"no_spread": 0.8, "solved_none": 0.7}, "", "give easier examples in train_dataset, or a reward"),
    ({"no_spread": 0.8}, "", "raise args.temperature (now 1) or args.num_generations (now 8), or give"),
    ({"rollout/truncated_fraction": 1.0}, "", "raise args.max_completion_length (now 64)"),
    ({"rollout/resampled": 99.0}, FILTER, 'or wider bounds in args.overrides["difficulty_filter"], or'),
    ({"rollout/turns": 1.0}, PENALTY, 'args.overrides["algorithm"]["overlong_penalty"] takes nothing'),
    ({"train/skipped_steps": 1.0}, "", "lower args.learning_rate (now 1e-06) or args.max_grad_norm (now"),
    ({"train/skipped_steps": 1.0}, "", "args.max_grad_norm (now 1), raise args.per_device_train_"),
    ({"train/skipped_steps": 1.0}, "", "batch_size (a batch has 128 now) or args.num_generations (now 8)"),
    ({"train/skipped_steps": 1.0}, "", "hold the policy with a larger args.beta"),
    ({"train/skipped_steps": 1.0}, BETA, "hold the policy by a larger args.beta (now 0.02)"),
    ({"train/mismatch_kl": 9.0}, "", 'or lower args.overrides["max_off_policy_steps"] (now 2)'),
]
#: What stands in a file alone.
OF_A_FILE = re.compile(
    r"\[[a-z_]+\]|take args|reward-service|(?<![\w\".])(sampling\.|learning_rate|batch_size)"
)


def lines(seen: dict[str, float], more: str) -> list[str]:
    """All that is said over so many steps, of which each shows this."""
    run: RunConfig = parse_run(TOML.format(more=more))
    step = {(name if "/" in name else f"env/{ENVIRONMENT}/{name}"): value for name, value in seen.items()}
    steps = [{"train/reward": 0.5, **step}] * WINDOW
    return [line for end in range(1, WINDOW + 1) for line in advice(run, steps[:end])]


@pytest.mark.parametrize(("seen", "more", "told"), SEEN)
def test_a_line_of_advice_is_in_the_words_of_a_script(seen: dict[str, float], more: str, told: str) -> None:
    said = lines(seen, more)
    assert said
    here = [advised(line, has_turns=False) for line in said]
    assert any(told in line for line in here), here
    assert not any(OF_A_FILE.search(line) for line in here), here
    # Where a script has an environment its arguments are its own.
    of_verifiers = [by_arguments(line, OF_VERIFIERS) for line in said]
    assert not any(re.search(r"\[[a-z_]+\]", line) for line in of_verifiers), of_verifiers


def test_a_rollout_that_takes_too_long_is_told_by_the_argument_for_it() -> None:
    """As the worker of an environment says it (quartet_envhost's worker.py)."""
    told = "not done after 0.5 s; a larger timeout_seconds (of its environment) gives them more"
    assert "a larger args.async_generation_timeout (of its" in by_arguments(told, OF_VERIFIERS)


def test_turns_are_what_tools_take() -> None:
    (cut,) = lines({"rollout/truncated_fraction": 1.0}, "")
    assert cut.endswith("raise sampling.max_tokens (now 64), or the turns that the environment allows")
    assert advised(cut, has_turns=False).endswith("raise args.max_completion_length (now 64)")
    assert advised(cut, has_turns=True).endswith("(now 64), or args.max_tool_calling_iterations")


def test_what_a_script_is_told_to_give_it_can_give() -> None:
    for kind, told in ((OfTrl, OF_TRL), (OfVerifiers, OF_VERIFIERS)):
        known = set(kind.names())
        assert set(told.values()) | {"beta", "overrides", "per_device_train_batch_size"} <= known
    assert "max_tool_calling_iterations" in OfTrl.names()


def test_a_line_that_advises_nothing_stays() -> None:
    for line in (
        "step 3  reward 0.5  learning_rate 1e-6",
        "loss = 0.1 (batch_size 8)",
        "goes on with other settings: max_concurrent was 8 and is 9",
    ):
        assert advised(line, has_turns=True) == by_arguments(line, OF_VERIFIERS) == line


def test_prompts_that_are_too_long_are_rows() -> None:
    line = (
        "the prompts of 256 tasks of environment 'reward-service', one after the other, have more than "
        "max_prompt_tokens = 5 tokens, the shortest of them 9; begin another run, with a larger "
        "max_prompt_tokens (and a context that holds them), or with tasks whose prompts are shorter"
    )
    here = advised(line, has_turns=False)
    assert "the prompts of 256 rows of train_dataset, one" in here
    assert here.count('args.overrides["max_prompt_tokens"]') == 2
    assert by_arguments(line, OF_VERIFIERS).count("args.max_prompt_length") == 2
