"""What stands in a file of vf-rl besides the keys of RLConfig: arguments of vLLM, tables of Quartet."""

from __future__ import annotations

import pytest
from quartet.config import ConfigError
from quartet.local.devices import shared_out
from quartet.run.vf_rl import translate
from vf_rl_tables import run_of, tables


def test_arguments_of_vllm_reach_the_engine() -> None:
    given = tables()
    given["inference"] = {
        "gpus": 4,
        "args": {
            "tensor-parallel-size": 2,
            "max_model_len": 4096,
            "max_num_seqs": 64,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "disable_log_requests": True,
        },
    }
    given["trainer"]["gpus"] = 2
    run = translate(given, "vllm")
    assert run.tables["inference"] == {
        "engine": "vllm",
        "max_model_len": 4096,
        "gpus": 4,
        "vllm": {
            "max_num_seqs": 64,
            "dtype": "bfloat16",
            "args": {"tensor_parallel_size": 2, "enforce_eager": True},
        },
    }
    assert not any("enforce_eager" in line for line in run.without_effect)
    assert any("disable_log_requests" in line for line in run.without_effect)
    # As vf-rl numbers devices, and as many engines as its data_parallel_size would be.
    placed = shared_out(run.tables, None)
    assert (placed["inference"]["gpus"], placed["inference"]["replicas"]) == (["0", "1", "2", "3"], 2)
    assert (placed["trainer"]["gpus"], placed["trainer"]["ranks"]) == (["4", "5"], 2)
    embedded = translate(given)
    assert embedded.tables["inference"] == {
        "engine": "embedded",
        "gpus": 4,
        "max_model_len": 4096,
        "embedded": {"max_num_seqs": 64, "dtype": "bfloat16"},
    }
    placed = shared_out(embedded.tables, None)
    assert (placed["inference"]["replicas"], placed["trainer"]["gpus"]) == (4, ["4", "5"])
    assert any("inference.args.enforce_eager = true (of vLLM" in line for line in embedded.without_effect)
    given["inference"]["args"]["tensor-parallel-size"] = 3
    with pytest.raises(ConfigError, match=r"inference\.gpus are 4, but 1 replicas of 3 devices"):
        shared_out(translate(given, "vllm").tables, None)


def test_devices_that_a_file_names_are_those_of_the_embedded_engine_too() -> None:
    """One each is also what a file says that says nothing; 0 is the CPU."""
    given = tables()
    assert "gpus" not in translate(given).tables["inference"], "one each, of which there may be none"
    assert translate(given, has_two_gpus=True).tables["inference"]["gpus"] == 1
    given["inference"]["gpus"] = 0
    placed = shared_out(translate(given).tables, None)
    assert (placed["inference"]["gpus"], placed["trainer"]["gpus"]) == ([], ["0"])


def test_an_algorithm_of_ones_own_beside_it() -> None:
    """What the refusals of older names say to write is read."""
    given = tables()
    given["algorithm"] = {"kl_coef": 0.1, "num_iterations": 2, "reference": {"sync_steps": 5}}
    algorithm = run_of(given).algorithm
    assert (algorithm.kl_coef, algorithm.num_iterations, algorithm.loss) == (0.1, 2, "ppo")
    assert algorithm.correction is not None and algorithm.correction.floor == 0.125


def test_without_lora_its_keys_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = translate(tables(use_lora=False, lora_rank=4))
    assert "trainer.args.lora_rank = 4 (use_lora = false)" in run.without_effect
    assert run.tables["lora"] == {"enabled": False}


def test_weights_and_biases_where_a_run_has_such_a_table() -> None:
    given = tables(report_to=["wandb"], run_name="mine")
    assert "wandb" not in translate(given).tables
    with_table = translate(given, wandb_project="theirs")
    assert with_table.tables["wandb"] == {"project": "theirs", "name": "mine"}
    assert not any("report_to" in line for line in with_table.without_effect)
    both = translate(tables(report_to=["wandb", "tensorboard"]), wandb_project="theirs")
    assert both.tables["wandb"]["project"] == "theirs" and both.tables["tensorboard"] == {"enabled": True}
    alone = translate(tables(report_to="tensorboard"), wandb_project="theirs")
    assert "wandb" not in alone.tables and alone.tables["tensorboard"] == {"enabled": True}
    assert not any("report_to" in line for line in alone.without_effect)
    silent = translate(tables(), wandb_project="theirs")
    assert "wandb" not in silent.tables, "who says nothing may have no account"
    assert any("write it in the file to report there" in line for line in silent.without_effect)
