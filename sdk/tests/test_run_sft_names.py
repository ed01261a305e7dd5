"""Names that people know of other trainers, of `quartet sft`: the refusal says what to write here."""

from __future__ import annotations

import re

import pytest
from quartet.cli.__main__ import build_parser
from quartet.config import ConfigError, load
from quartet.config.keys import known_keys
from quartet.config.load import Draft
from quartet.run import other_meanings, other_names
from quartet.run.sft import SftConfig
from quartet.run.sft_names import OTHERWISE, REMEDIES, SAME

#: Sentences of what a fine-tuning has not, and names of the passes of a policy gradient.
OF_A_RUN = re.compile(
    r"algorithm\.|'sampling\.|\[sampling\]|\[inference|\[\[env\]\]|rewards are|rollouts|critic|"
    r"difficulty_filter|weights travel|answer ends|every sampled|\[orchestrator\]"
)
OF_ITS_PASSES = re.compile(r"ppo|rollout|log_prob|forward")
#: Keys of the tables of services, and lines of the data, of which a sentence may speak.
ELSEWHERE = {"gradient_checkpointing", "optimizer_offload", "ranks", "device"}
FLAGS = build_parser().parse_known_args(["sft"])[0].flags


def told(option: str) -> str:
    """What is said of `--option=x` of `quartet sft`."""
    with pytest.raises(ConfigError) as caught:
        load(SftConfig, ["--model", "m", "--data", "d", f"--{option}=x"], Draft(flags=FLAGS))
    return str(caught.value.each[0])


@pytest.mark.parametrize("name", sorted(REMEDIES))
def test_each_of_them_is_told_by_what_it_is_here(name: str) -> None:
    """sft_names.py 1: as an option, with dashes or without."""
    assert told(name) == f"unknown key {name!r}; {REMEDIES[name]}"
    assert told(name.replace("_", "-")).endswith(f"; {REMEDIES[name]}")


def test_a_batch_of_each_device_is_told_from_a_part_of_one() -> None:
    """As TRL has it, a step takes it of every device."""
    assert told("per_device_train_batch_size").endswith(
        "; set 'batch_size', the chats of an optimizer step, of all devices together"
    )
    assert "microbatch_tokens" in told("micro_batch_size")
    assert "microbatch_tokens" in told("per_device_eval_batch_size")


def test_names_of_other_trainers_are_no_keys_and_stand_for_keys() -> None:
    known = known_keys(SftConfig)
    assert set(SAME.values()) <= known.keys()
    assert not SAME.keys() & OTHERWISE.keys() and not REMEDIES.keys() & known.keys()
    quoted = {key for sentence in OTHERWISE.values() for key in re.findall(r"'([\w.]+)'", sentence)}
    last = {key.rpartition(".")[2] for key in known}
    assert quoted <= known.keys() | last | ELSEWHERE


def test_what_a_run_knows_by_another_name_a_fine_tuning_knows_too() -> None:
    """Of the keys that both have."""
    known = known_keys(SftConfig)
    lacking = (
        {name for name, key in other_names.SAME.items() if key in known} - REMEDIES.keys() - known.keys()
    )
    assert lacking == set()


def test_what_is_said_otherwise_in_a_run_is_known_too() -> None:
    """Unless it is of sampling, rewards or a policy gradient."""
    known = known_keys(SftConfig)
    meant = {
        name
        for name, said in other_meanings.OTHERWISE.items()
        if not OF_A_RUN.search(said) and not OF_ITS_PASSES.search(name)
    }
    assert sorted(meant - REMEDIES.keys() - known.keys()) == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("packing_strategy", "set 'packing' to \"best_fit\""),  # TRL
        ("pack_function", "set 'packing' to \"best_fit\""),  # prime-rl
        ("sample_packing", "set 'packing' to \"best_fit\""),  # axolotl
        ("neat_packing", "set 'packing' to \"best_fit\""),  # LLaMA-Factory
        ("packing_samples", "set 'packing' to \"best_fit\""),  # OpenRLHF
        ("cutoff_len", "it is called 'max_tokens' here"),
        ("roles_to_train", "it is called 'roles' here"),
        ("optim.lr", "it is called 'learning_rate' here"),
        ("optim.foreach", "'optimizer' (its type), 'learning_rate'"),
        ("lora_path", "it is called 'lora.initial_adapter' here"),
        ("resume_from_checkpoint", "write --resume on the command line"),
    ],
)
def test_what_people_type_first(option: str, said: str) -> None:
    assert said in told(option)


@pytest.mark.parametrize("value", ["true", "bfd", "1"])
def test_packing_by_a_value_of_others_is_told_its_own(value: str) -> None:
    with pytest.raises(ConfigError, match=r"packing = .* is refused: should be 'drawn' or 'best_fit'"):
        load(SftConfig, ["--model", "m", "--data", "d", "--packing", value])
