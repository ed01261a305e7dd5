"""Names that people know of other trainers: each is refused, and the refusal says what to write here."""

from __future__ import annotations

from pathlib import Path

import pytest
from quartet.cli.__main__ import build_parser
from quartet.config import ConfigError, load
from quartet.config.load import Draft
from quartet.run.config import RunConfig
from quartet.run.other_names import REMEDIES

FLAGS = build_parser().parse_known_args(["rl"])[0].flags
RUN = 'model = "m"\n[[env]]\nid = "e"\n[[eval.env]]\nid = "e"\n'


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return str(path)


def told(file: str, option: str) -> str:
    """What is said of `--option=x` of `quartet rl`."""
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, ["@", file, f"--{option}=x"], Draft(flags=FLAGS))
    return str(caught.value.each[0])


@pytest.mark.parametrize("name", sorted(REMEDIES))
def test_each_of_them_is_told_by_what_it_is_here(file: str, name: str) -> None:
    """other_names.py 1 and 2: as an option, with dashes or without."""
    table, dot, rest = name.rpartition("env.")
    typed = f"{table}env.0.{rest}" if dot else name
    remedy = REMEDIES[name].replace(f"'{table}env.", f"'{table}env.0.") if dot else REMEDIES[name]
    assert told(file, typed) == f"unknown key {typed!r}; {remedy}"
    assert told(file, typed.replace("_", "-")).endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        # Of TRL.
        ("overwrite_output_dir", "write --overwrite on the command line"),
        ("per_device_train_batch_size", "set 'batch_size', which counts the rollouts"),
        ("num_train_epochs", "set 'max_steps', of batch_size rollouts each"),
        ("total_epochs", "passes x examples x rollouts_per_example / batch_size steps ('quartet env show"),
        ("num_generations", "it is called 'rollouts_per_example' here"),
        ("max_completion_length", "it is called 'sampling.max_tokens' here"),
        ("max_seq_length", "set 'max_model_len' in the table [inference]"),
        ("resume_from_checkpoint", "write --resume on the command line"),
        ("epsilon_high", "set 'algorithm.epsilon_high' beside an 'algorithm.preset' that clips"),
        ("reward_weights", "set 'algorithm.reward_weights' beside 'algorithm.advantage' = \"gdpo\""),
        ("checkpoint", "write a table [ckpt] with interval, in steps, and keep_last"),
        # Of vLLM and of OpenAI's clients.
        ("sampling.eos_token", "for other ends set 'sampling.stop' to a list of texts"),
        ("sampling.n", "it is called 'rollouts_per_example' here"),
        ("max_tokens", "did you mean 'sampling.max_tokens'?"),
        # Of verl and SkyRL, in their tables.
        ("data.train_batch_size", "set 'batch_size', which counts the rollouts"),
        ("actor_rollout_ref.actor.optim.lr", "it is called 'learning_rate' here"),
        ("actor_rollout_ref.rollout.temperature", "did you mean 'sampling.temperature'?"),
        ("algorithm.kl_ctrl.kl_coef", "it is called 'algorithm.kl_coef' here"),
        ("generator.n_samples_per_prompt", "it is called 'rollouts_per_example' here"),
        ("generator.backend", "how many are sampled is 'rollouts_per_example'"),
        ("actor_rollout_ref.model.path", "set 'model' to its folder or hub id"),
        ("actor_rollout_ref.rollout.name", 'choose engine = "vllm" in the table [inference]'),
        ("actor_rollout_ref.rollout.val_kwargs.n", "it is called 'eval.rollouts_per_example' here"),
        ("generator.eval_sampling_params.temperature", "it is called 'eval.sampling.temperature' here"),
        ("algorithm.loss_agg_mode", "set 'algorithm.aggregation' to token, sequence or constant"),
        ("algorithm.use_kl_loss", "set 'algorithm.kl_coef' to more than 0"),
        # Of tinker-cookbook.
        ("groups_per_batch", "set 'batch_size', which counts the rollouts"),
        ("eval_every", "it is called 'eval.interval' here"),
        # Of Hosted Training.
        ("oversampling_factor", "set 'max_concurrent' to how many rollouts are under way"),
        ("trajectory_strategy", "rollouts of several turns are one sample"),
        ("env_file", "services inherit the environment"),
        ("val.num_examples", "write a table [eval], with num_examples"),
        ("critic.optim.lr", "there is no critic"),
        # Of prime-rl.
        ("optim.lr", "it is called 'learning_rate' here"),
        ("optim.foreach", "'optimizer' (its type), 'learning_rate'"),
    ],
)
def test_what_people_type_first(file: str, option: str, said: str) -> None:
    assert said in told(file, option)


@pytest.mark.parametrize("key", ["sampling.bad_words", "sampling.best_of", "sampling.length_penalty"])
def test_a_key_of_a_known_table_is_not_guessed_by_its_tables_name(file: str, key: str) -> None:
    """No key of `env.sampling` is what was meant because both say "sampling."."""
    assert f"unknown key {key!r}; known keys here: max_tokens, min_tokens," in told(file, key)


def test_each_key_that_options_give_in_a_table_of_others_is_told(file: str) -> None:
    """As a whole command line of verl: keys that are not known by their names are told once, by the table."""
    given = ["rollout.n=8", "actor.optim.lr=1e-6", "actor.strategy=fsdp", "ref.strategy=fsdp"]
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, ["@", file, *(f"--actor_rollout_ref.{one}" for one in given)])
    told = [str(one) for one in caught.value.each]
    assert told[:2] == [
        "unknown key 'actor_rollout_ref.rollout.n'; it is called 'rollouts_per_example' here",
        "unknown key 'actor_rollout_ref.actor.optim.lr'; it is called 'learning_rate' here",
    ]
    assert [one.partition(";")[0] for one in told[2:]] == ["unknown key 'actor_rollout_ref'"]


def test_hydras_way_to_give_a_key_of_others_is_told_what_it_is_here(file: str) -> None:
    given = ["actor_rollout_ref.rollout.n=8", "algorithm.adv_estimator=grpo", "data.train_batch_size=512"]
    given += ["trainer.policy.model.path=X", "max_steps=8", "trainer.threads=2"]
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, ["@", file, *given])
    told = sorted(str(one).partition(";")[0] for one in caught.value.each)
    assert told == [
        "argument 'max_steps=8' is not understood",
        "argument 'trainer.threads=2' is not understood",
        "there is no option '--trainer.policy.model.path'",
        "unknown key 'actor_rollout_ref.rollout.n'",
        "unknown key 'algorithm.adv_estimator'",
        "unknown key 'data.train_batch_size'",
    ]
