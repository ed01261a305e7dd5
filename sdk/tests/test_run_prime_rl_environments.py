"""The dialect of prime-rl: environments, what trains on them, and evaluations."""

from __future__ import annotations

import copy

import pytest
from prime_rl_tables import run_of, tables, values
from quartet.config import ConfigError
from quartet.run.hosted import MAX_TIMEOUT_SECONDS
from quartet.run.prime_rl import translate
from quartet.run.prime_rl.sampling import WHOLE_CONTEXT

PLAIN = {"taskset": {"id": "a"}, "harness": {"id": "null"}}


def test_what_is_of_training_or_of_evaluations_is_told_of_the_other() -> None:
    """given.py 3; and that a role without a harness is another agent than there."""
    given = tables()
    given["orchestrator"]["train"]["source"][0]["interval"] = 5
    source = {"taskset": {"id": "a"}, "ratio": 2, "sampling": {"temperature": 1.0}}
    given["orchestrator"]["eval"] = {"source": [source]}
    assert translate(given).without_effect == (
        "orchestrator.train.source.0.interval = 5 (it is of evaluations)",
        "orchestrator.eval.source.0.ratio = 2 (it is of training)",
        'orchestrator.eval.source.0.harness = null (prime-rl plays it by "bash" in a sandbox; here it is a '
        "chat with the tools of the taskset, unless that brings a harness; name one, with its runtime)",
    )


def test_no_time_at_all_is_not_a_week() -> None:
    given = tables()
    given["orchestrator"]["train"]["source"][0]["timeout"] = 0
    with pytest.raises(ConfigError, match=r"timeout_seconds = 0"):
        run_of(given)


def test_every_form_of_an_environment() -> None:
    classic = tables('orchestrator.env = [{ id = "o/e@1", args = { a = 1 }, timeout = 60, ratio = 2 }]')
    del classic["orchestrator"]["train"]
    assert translate(classic).tables["env"] == [
        {"id": "o/e@1", "args": {"a": 1}, "timeout_seconds": 60.0, "weight": 2.0}
    ]
    alone = tables('orchestrator.environment = { id = "e" }')
    del alone["orchestrator"]["train"]
    assert translate(alone).tables["env"][0]["id"] == "e"
    args = {"split": "train", "rollouts_per_example": 4, "max_concurrent": 512}
    alone["orchestrator"] = {"environment": {"id": "e", "args": args}}  # as the documents of 2025 have it
    run = translate(alone)
    assert run.tables["env"][0]["args"] == {"split": "train"}
    assert (run.tables["rollouts_per_example"], run.tables["max_concurrent"]) == (4, 512)
    assert [line.partition(" (")[2] for line in run.without_effect] == [
        "as an argument of an environment; read as orchestrator.rollouts_per_example)",
        "as an argument of an environment; read as orchestrator.max_concurrent)",
    ]
    alone["orchestrator"] |= {"rollouts_per_example": 8, "max_inflight_rollouts": 64}
    assert translate(alone).tables["env"][0]["args"] == args, "the environment's, where both are said"
    given = tables()
    (source,) = given["orchestrator"]["train"]["source"]
    source["env"] = {
        "id": "best-of-n",
        "n": 4,
        "taskset": {"id": "gsm8k", "split": "train"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "docker"}, "max_turns": 3},
    }
    (env,) = translate(given).tables["env"]
    agent = {"runtime": {"type": "docker"}, "max_turns": 3}
    assert (env["id"], env["args"]) == (
        "gsm8k",
        {"split": "train", "env": "best-of-n", "n": 4, "agent": agent},
    )


def test_a_role_has_its_harness_with_or_without_a_runtime_in_it() -> None:
    given = tables()
    (source,) = given["orchestrator"]["train"]["source"]
    here = {"id": "null", "runtime": {"type": "subprocess"}}
    source["env"] |= {
        "player": {"harness": here},
        "judge": {"harness": {"id": "bash", "runtime": {"type": "docker"}}},
        "solver": (solver := {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}),
    }
    judge = {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    assert translate(given).tables["env"][0]["args"] == {"judge": judge, "solver": solver}


def test_what_is_none_for_an_environment_is_told() -> None:
    given = tables()
    agent = {"harness": {"id": "null"}, "runtime": {"type": "prime", "idle": "None"}}
    given["orchestrator"]["train"]["source"][0]["env"]["agent"] = agent
    run = translate(given)
    assert run.tables["env"][0]["args"] == {"agent": {"runtime": {"type": "prime"}}}
    (told,) = run.without_effect
    assert told.endswith("0.args.agent.runtime.idle = null (the environment's own default holds)")


def test_what_environments_of_one_run_cannot_differ_in() -> None:
    given = tables()
    source = given["orchestrator"]["train"]["source"]
    source.append({**copy.deepcopy(source[0]), "name": "two", "group_size": 4})
    with pytest.raises(ConfigError, match=r"source\.1\.group_size = 4 is refused: all environments"):
        translate(given)
    source[1] |= {"group_size": 8, "sampling": {"temperature": 0.5}}
    with pytest.raises(ConfigError, match=r"source\.1\.sampling\.temperature = 0\.5 .* have one temperature"):
        translate(given)


def test_what_an_environment_samples_otherwise_stands_in_its_table() -> None:
    given = tables("orchestrator.train.sampling = { max_completion_tokens = 128, top_p = 0.9 }")
    source = given["orchestrator"]["train"]["source"]
    long = {"max_tokens": 512, "temperature": 1.0, "extra_body": {"top_k": 20, "return_token_ids": True}}
    source += [{**copy.deepcopy(source[0]), "name": name} for name in ("long", "whole")]
    source[1]["sampling"] = long
    source[2]["sampling"] = {"max_completion_tokens": "None", "top_p": 0.9}
    found = translate(given)
    assert found.tables["sampling"] == {"max_tokens": 128, "top_p": 0.9, "temperature": 1.0}
    assert [env.get("sampling") for env in found.tables["env"]] == [
        None,
        {"max_tokens": 512, "top_k": 20},
        {"max_tokens": WHOLE_CONTEXT},
    ]
    place = "orchestrator.train.source.1.sampling"
    assert found.origins["env", "1", "sampling", "max_tokens"] == f"{place}.max_tokens"
    assert found.origins["env", "1", "sampling", "top_k"] == f"{place}.extra_body.top_k"
    (told,) = found.without_effect
    assert told.startswith(f"{place}.extra_body.return_token_ids = true")
    assert run_of(given).constant_tokens == WHOLE_CONTEXT
    source[2]["sampling"] = {"top_p": "None"}
    with pytest.raises(
        ConfigError, match=r"source\.2\.sampling\.top_p = null is refused: where an environment"
    ):
        translate(given)


def test_what_all_environments_sample_alike_is_of_the_run() -> None:
    given = tables()
    source = given["orchestrator"]["train"]["source"]
    source[0]["sampling"] = {"max_tokens": 64}
    source.append({**copy.deepcopy(source[0]), "name": "two"})
    found = translate(given).tables
    assert found["sampling"]["max_tokens"] == 64 and not any("sampling" in env for env in found["env"])


def test_settings_of_a_template_that_would_add_up_are_told() -> None:
    given = tables("orchestrator.train.sampling.extra_body.chat_template_kwargs = { thinks = true }")
    source = given["orchestrator"]["train"]["source"]
    source.append({**copy.deepcopy(source[0]), "name": "two"})
    own = {"chat_template_kwargs": {"thinks": False}}
    source[1]["sampling"] = {"extra_body": own}
    tell = [env.get("sampling") for env in translate(given).tables["env"]]
    assert tell == [None, {"template_settings": {"thinks": False}}]
    own["chat_template_kwargs"] = {"style": "short"}
    with pytest.raises(ConfigError, match="settings of a chat template add up here; say thinks in it, too"):
        translate(given)


def test_evaluations() -> None:
    given = tables("orchestrator.eval.interval = 5")
    given["orchestrator"]["eval"]["source"] = [
        {"env": {"taskset": {"id": "a"}}, "group_size": 4},
        {"env": {"taskset": {"id": "b"}}, "num_examples": 12},
    ]
    run = run_of(given)
    expected = {
        "eval.interval": 5,
        "eval.before": True,
        "eval.after": True,
        "eval.timeout_seconds": MAX_TIMEOUT_SECONDS,
        "eval.env.0.rollouts_per_example": 4,
        "eval.env.1.num_examples": 12,
    }
    assert values(run, expected) == expected
    assert [trial.num_examples for trial in run.trials] == [1_000_000, 12], "all that there are"
    given["orchestrator"]["eval"]["sampling"] = {"temperature": 0.0, "max_completion_tokens": 9}
    given["orchestrator"]["eval"]["source"][1]["sampling"] = {"temperature": 0.6, "top_k": 20}
    a, b = (trial.sampling for trial in run_of(given).trials)
    assert (a.temperature, a.max_tokens, a.top_k) == (0.0, 9, None)
    assert (b.temperature, b.max_tokens, b.top_k) == (0.6, 9, 20)
    mine = {"eval": {"temperature": 0.1}}
    assert translate(given, own=mine).tables["eval"]["sampling"] == {"max_tokens": 9}


def test_the_context_is_as_long_as_evaluations_need_it() -> None:
    """Where training ends its answers before."""
    given = tables("seq_len = 2048\ninference.model.max_model_len = 40960")
    sampled = {"max_completion_tokens": 32768}
    given["orchestrator"]["eval"] = {"source": [PLAIN], "sampling": sampled}
    found = translate(given)
    assert found.tables["inference"]["max_model_len"] == 2048
    (told,) = found.without_effect
    assert told.startswith(
        "orchestrator.eval.sampling.max_completion_tokens = 32768 (it ends at seq_len = 2048"
    )
    given["orchestrator"]["train"]["sampling"] = {"max_completion_tokens": 1024}
    found = translate(given)
    assert found.tables["inference"]["max_model_len"] == 40960
    (told,) = found.without_effect
    assert told.startswith(
        "seq_len = 2048 (the context is longer, for evaluations; a rollout of several turns"
    )
    del given["inference"]
    assert "max_model_len" not in translate(given).tables["inference"], "all that the model was made for"
    sampled["max_completion_tokens"] = 1024
    assert translate(given).tables["inference"]["max_model_len"] == 2048


def test_tasks_of_an_evaluation_are_its_examples() -> None:
    given = tables("orchestrator.eval.num_tasks = 64")
    sources = [{"env": {"taskset": {"id": "a"}}}, {"env": {"taskset": {"id": "b"}}, "num_tasks": 12}]
    given["orchestrator"]["eval"]["source"] = sources
    assert [trial.num_examples for trial in run_of(given).trials] == [64, 12]


def test_what_evaluations_take_from_training_is_told() -> None:
    """sampling.py 2: an answer to an evaluation is not cut where training's are."""
    given = tables("orchestrator.train.sampling = { max_completion_tokens = 128, top_p = 0.9 }")
    given["orchestrator"]["eval"] = {"source": [PLAIN]}
    (told,) = translate(given).without_effect
    assert told.startswith("orchestrator.eval without sampling (evaluations sample as training does where it")
    assert "says nothing: top_p = 0.9;" in told
    assert translate(given).tables["eval"]["sampling"] == {"max_tokens": WHOLE_CONTEXT}
    given["orchestrator"]["eval"]["sampling"] = {"temperature": 0.6, "top_p": 0.9}
    assert translate(given).without_effect == ()
    given["orchestrator"] |= {"eval": {"source": [PLAIN]}, "log": {}}
    del given["orchestrator"]["train"]["sampling"]
    assert translate(given).without_effect == (), "the file says nothing of it, and nothing in [log]"


def test_a_gate_by_its_path_is_told_how_it_is_written() -> None:
    given = tables()
    gate = {"import_path": "prime_rl.orchestrator.curricula.AdvantageRangeGate"}
    given["orchestrator"]["train"]["source"][0]["curriculum"] = {"gates": {"zero": gate}}
    with pytest.raises(ConfigError, match=r'write { type = "advantage_range" } for that, or remove it'):
        translate(given)
