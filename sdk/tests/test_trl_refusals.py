"""What of a script of TRL is refused, in a sentence each, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import quartet.trl
from quartet.scripts.models import Model
from quartet.trl import ConfigError, GRPOConfig
from quartet.trl.elsewhere import BEFORE, OF_TRL, TRAINER
from quartet.trl.translate import Data, translate
from quartet.trl.untranslated import REFUSED
from trl_script import ADDRESS, translated


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"per_device_train_batch_size": 4}, "num_generations = 8 does not divide the 4 completions of"),
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 2},
            "does not divide the 4 completions of an optimizer step",
        ),
        ({"num_generations": 1}, "args.num_generations = 1 is refused: should be a whole number from 2"),
        ({"num_generations": None}, "args.num_generations = None is refused: should be a number"),
        ({"generation_batch_size": 12}, "should be a multiple of the 8 of all devices at once"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "say the same; give one"),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, "per_generation = 2 is refused"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "should be a multiple of gradient"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2},
            "the same ones 2 times, would be in one optimizer step",
        ),
        ({"max_steps": 0}, "a run is as many optimizer steps as this says, or -1 for epochs"),
        ({"num_train_epochs": 0.0}, "args.num_train_epochs = 0.0 is refused: should be above 0"),
        ({"per_device_train_batch_size": 1024}, "train_dataset has 100 prompts, and one batch takes 128"),
        ({"loss_type": "ppo"}, "should be one of dapo, grpo, bnpo, dr_grpo, luspo, cispo, sapo, vespo"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "divides by max_completion_length; set it"),
        ({"scale_rewards": "batch"}, '"reinforce_pp"}} divides by one deviation'),
        ({"multi_objective_aggregation": "sum"}, "should be one of sum_then_normalize, normalize_then_sum"),
        ({"importance_sampling_level": "turn"}, "should be one of token, sequence"),
        ({"delta": 1.1}, "delta = 1.1 is not above 1 + clip_high"),
        ({"epsilon": 1.5}, "args.epsilon = 1.5 is refused"),
        ({"beta": -0.1}, "args.beta = -0.1 is refused"),
        ({"sync_ref_model": True}, "beta = 0 reads no reference"),
        ({"top_entropy_quantile": 0.0}, "args.top_entropy_quantile = 0.0 is refused"),
        ({"entropy_coef": 0.1, "loss_type": "luspo"}, "the entropy is divided as the loss is"),
        ({"entropy_coef": 0.1, "top_entropy_quantile": 0.2}, "refused beside top_entropy_quantile = 0.2"),
        ({"use_adaptive_entropy": True, "entropy_coef_max": 0.5}, "kept within 0 and 1; leave it out"),
        ({"router_aux_loss_coef": 0.1}, "routers are trained by the loss alone"),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
             "vllm_importance_sampling_clip_min": 0.5},
            "set vllm_importance_sampling_mode to 'token_mask'",
        ),
        ({"use_vllm": True, "vllm_mode": "elsewhere"}, "should be one of colocate, server"),
        ({"generation_kwargs": {"num_beams": 4}}, "args.generation_kwargs: num_beams = 4 is refused"),
        ({"generation_kwargs": {"seed": 1}}, "[sampling] has no such key; known are max_new_tokens"),
        ({"generation_kwargs": {"temperature": 0.0}}, "args.generation_kwargs: sampling.temperature = 0.0"),
        ({"temperature": 0.0}, "a greedy group has no spread to learn from"),
        ({"model_init_kwargs": {"revision": "x"}}, "model_init_kwargs: revision = 'x' is refused"),
        ({"chat_template_kwargs": "{}"}, "args.chat_template_kwargs = '{}' is refused: should be a dict"),
        ({"eval_strategy": "steps", "evaluation": 0}, "'steps' measures eval_dataset; give one to"),
        ({"eval_on_start": True, "evaluation": 0}, "args.eval_on_start = True measures eval_dataset"),
        ({"save_strategy": "best"}, "should be one of no, steps, epoch"),
        ({"overrides": {"env": []}}, "it is made of reward_funcs and train_dataset"),
        ({"overrides": {"model": "m"}}, "give GRPOTrainer another model"),
        ({"overrides": {"max_stesp": 1}}, "max_steps"),
        ({"rollout_timeout": 0.0}, "args.rollout_timeout = 0.0 is refused"),
        (
            {"max_tool_calling_iterations": -1, "has_tools": True},
            "max_tool_calling_iterations = -1 is refused: should be a whole number from 0",
        ),
        (
            {"max_tool_calling_iterations": 1024, "has_tools": True},
            "max_tool_calling_iterations = 1024 is refused: should be 1023 at most; None is as many",
        ),
        ({"logging_dir": "x"}, "args.logging_dir: there is no such argument; metrics are in output_dir"),
        ({"no_cuda": True}, "args.no_cuda: there is no such argument; it is called use_cpu"),
        ({"vllm_dtype": "auto"}, "args.vllm_dtype: there is no such argument; train() starts the engine"),
        ({"kl_coef": 0.1}, "args.kl_coef: there is no such argument; it is called beta"),
        ({"max_new_tokens": 4}, "args.max_new_tokens: there is no such argument; it is called max_compl"),
        ({"quux": 4}, "docs/trl.md lists them"),
        ({"max_prompt_length": 128}, 'overrides = {"max_prompt_tokens": 128} leaves out those'),
        ({"num_generation": 4}, "did you mean 'num_generations'?"),
    ],
)  # fmt: skip
def test_it_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        translated(**given)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_another_value_than_the_default_is_refused(name: str) -> None:
    known = REFUSED[name]
    assert translated(**{name: known.default}).notes == ()
    other = not known.default if isinstance(known.default, bool) else 7
    with pytest.raises(ConfigError, match=rf"args\.{name} = {other} is refused: "):
        translated(**{name: other})


def test_a_reference_does_not_follow_an_adapter() -> None:
    from quartet.trl import LoraConfig

    with pytest.raises(ConfigError, match="with peft_config the reference is the model without its adapter"):
        translated(sync_ref_model=True, beta=0.1, peft_config=LoraConfig())


def test_all_that_is_wrong_of_a_list_of_arguments_is_told() -> None:
    with pytest.raises(ConfigError) as refused:
        GRPOConfig("out", num_generation=4, beta="x")
    assert "num_generations" in str(refused.value) and "args.beta = 'x'" in str(refused.value)


def test_what_trl_has_beside_is_told() -> None:
    for name, why in OF_TRL.items():
        with pytest.raises(AttributeError) as caught:
            getattr(quartet.trl, name)
        assert str(caught.value) == f"quartet.trl has no {name}: {why}"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = quartet.trl.nothing
    assert all(hasattr(quartet.trl, name) for name in quartet.trl.__all__)
    assert not set(BEFORE) & set(GRPOConfig.names()) and "optimizers" in TRAINER


def test_a_preset_of_overrides_that_has_no_ratio_is_told_by_its_keys() -> None:
    """What the arguments say beside it is theirs to take back."""
    with pytest.raises(ConfigError) as refused:
        translate(
            GRPOConfig(off_policy_mask_threshold=0.1, overrides={"algorithm": {"preset": "sft"}}),
            Model("m", "/m"),
            Data(100, 0, ADDRESS),
        )
    assert "off_policy_mask" in str(refused.value)


def test_of_keys_that_a_refusal_names_whole_their_arguments_alone_are_told() -> None:
    """Not of others that end alike: ckpt.interval is save_steps."""
    with pytest.raises(ConfigError) as refused:
        translated(overrides={"eval": {"interval": 2}})
    assert str(refused.value).endswith(
        "(eval.num_examples is args.eval_strategy, eval.interval is args.eval_steps)"
    )
