"""The dialect of prime-rl: machines, devices, and the job that the run is (prime_rl/machines.py)."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prime_rl_files import CLASSIC, MACHINES, SOURCES, TASKSETS
from prime_rl_tables import tables
from quartet.cli.run_file import RunFile, load_run
from quartet.cli.slurm import script
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.prime_rl import Form, form_of, translate
from quartet.run.prime_rl.form import INSIDE, OF_BOTH_SLURMS, OF_OUR_SLURM
from quartet.run.slurm import SlurmConfig

SEVERAL = 'deployment.type = "multi_node"\ndeployment.num_train_nodes = 2\n'

ON_ONE = {"trainer.gpus": 1, "inference.gpus": 1}


def placed(said: str, engine: Any = "vllm", **how: bool) -> dict[str, Any]:
    """What becomes of the keys of this module, by the names of the run's."""
    run = translate(tables(said), engine, **how).tables
    found = {
        f"{service}.{key}": run[service][key]
        for service in ("trainer", "inference")
        for key in ("nodes", "gpus", "context_parallel")
        if key in run.get(service, {})
    }
    tp = run["inference"].get("vllm", {}).get("args", {}).get("tensor_parallel_size")
    return (
        found
        | ({"tp": tp} if tp else {})
        | {f"slurm.{key}": value for key, value in run.get("slurm", {}).items()}
    )


def test_a_file_for_slurm_is_a_run_over_several_machines() -> None:
    """machines.py 2, 4"""
    given = tomllib.loads(MACHINES)
    assert form_of(given)[0] is Form.THEIRS
    run = translate(given, "vllm")
    config = validate(RunConfig, run.tables)
    assert (config.trainer["nodes"], config.trainer["gpus"]) == (2, 8)
    assert (config.inference["nodes"], config.inference["gpus"]) == (4, 8)
    assert config.inference["vllm"]["args"] == {"tensor_parallel_size": 4}
    assert config.slurm == SlurmConfig(
        job_name="math-30b",
        partition="prod",
        account="research",
        time="24:00:00",
        options=("--nodelist=n[01-08]", "--exclude=n03"),
        setup=(r"eval $'set -e\nmodule load cuda\nuv sync --group mamba-ssm\nset +e'",),
    )
    assert run.origins["inference", "nodes"] == "deployment.num_infer_nodes"
    assert run.origins["slurm", "options"] == "slurm.nodelist and slurm.exclude"
    assert [line for line in run.without_effect if line.startswith(("deployment", "slurm"))] == [
        "deployment.nodes_per_fsdp_group = 1 (ranks share the model by FSDP2)",
        "deployment.orchestrator_on_inference = true (the orchestrator is on the first machine)",
        'slurm.project_dir = "/home/me/prime-rl" (a job runs in the folder that it is queued from)',
        "slurm.cleanup_grace_period = 600 (a job ends with its run)",
    ]


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        # One machine, as ever.
        ("deployment.gpus_per_node = 4", ON_ONE),
        ('deployment.type = "single_node"', ON_ONE),
        ('inference.deployment.type = "single_node"', ON_ONE),
        ("deployment = { num_train_gpus = 2, num_infer_nodes = 0 }", ON_ONE | {"trainer.gpus": 2}),
        ("inference_gpu_ids = [0]\ntrainer_gpu_ids = [2]", {"trainer.gpus": [2], "inference.gpus": [0]}),
        # Several.
        (SEVERAL, {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 1, "inference.gpus": 8}),
        (
            SEVERAL + "deployment.num_infer_nodes = 3\ndeployment.gpus_per_node = 4",
            {"trainer.nodes": 2, "trainer.gpus": 4, "inference.nodes": 3, "inference.gpus": 4},
        ),
        (
            SEVERAL + "deployment.num_infer_replicas = 3",
            {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 3, "inference.gpus": 8},
        ),
        (
            SEVERAL + 'inference.deployment.type = "multi_node"\ndeployment.num_infer_replicas = 2',
            {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 4, "inference.gpus": 8},
        ),
        (
            SEVERAL + 'inference.deployment = { type = "multi_node", num_nodes = 3 }',
            {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 3, "inference.gpus": 8},
        ),
        (
            SEVERAL + "inference.parallel = { tp = 4, dp = 2 }",
            {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 1, "inference.gpus": 8, "tp": 4},
        ),
        (
            SEVERAL + "inference.parallel = { tp = 8, dp = 2 }\ndeployment.num_infer_nodes = 2",
            {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 2, "inference.gpus": 8, "tp": 8},
        ),
        (
            SEVERAL + "inference.enable_expert_parallel = true\ninference.parallel.tp = 8",
            {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 1, "inference.gpus": 8, "tp": 8},
        ),
        # Ranks that share sequences.
        ("trainer.model.cp = 1", ON_ONE),
        (
            "trainer.model.cp = 2\ndeployment.num_train_gpus = 4",
            {"trainer.gpus": 4, "inference.gpus": 1, "trainer.context_parallel": 2},
        ),
        (
            SEVERAL + "trainer.model.cp = 16",
            {
                **{"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 1, "inference.gpus": 8},
                "trainer.context_parallel": 16,
            },
        ),
        # Of inference alone.
        (
            'inference.deployment = { type = "multi_node", num_nodes = 4, gpus_per_node = 2 }\n'
            "deployment.num_train_gpus = 2",
            {"trainer.gpus": 2, "inference.nodes": 4, "inference.gpus": 2},
        ),
        # As an option says it.
        ("trainer_gpu_ids = 0\ninference_gpu_ids = [1]", {"trainer.gpus": [0], "inference.gpus": [1]}),
        # Before there was [deployment].
        (
            "slurm = { num_train_nodes = 2, num_infer_nodes = 1, gpus_per_node = 4, job_name = 'j' }",
            {
                **{"trainer.nodes": 2, "trainer.gpus": 4, "inference.nodes": 1, "inference.gpus": 4},
                **{"slurm.job_name": "j", "slurm.partition": "cluster"},
            },
        ),
        (
            "num_train_nodes = 2\nnum_infer_nodes = 1\njob_name = 'j'",
            {
                **{"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 1, "inference.gpus": 8},
                **{"slurm.job_name": "j", "slurm.partition": "cluster"},
            },
        ),
        # A job of one machine: prime-rl's script asks for all of it.
        (
            "slurm = {}",
            ON_ONE | {"slurm.partition": "cluster", "slurm.gpus_per_node": 8},
        ),
        (
            "deployment.gpus_per_node = 4\nslurm = { partition = 'None', account = 'a', time = '1-00' }",
            ON_ONE | {"slurm.gpus_per_node": 4, "slurm.account": "a", "slurm.time": "1-00"},
        ),
        (
            "slurm = { partition = 'p', exclude = 'a,b', pre_run_command = 'sudo pkill -f vllm' }",
            {
                **ON_ONE,
                **{"slurm.partition": "p", "slurm.gpus_per_node": 8},
                **{"slurm.options": ["--exclude=a,b"], "slurm.setup": ["sudo pkill -f vllm"]},
            },
        ),
        (
            'inference.deployment = { type = "multi_node", gpus_per_node = 2 }\nslurm.partition = "p"',
            {
                **{"trainer.gpus": 1, "inference.nodes": 2, "inference.gpus": 2},
                **{"slurm.partition": "p"},
            },
        ),
    ],
)  # fmt: skip
def test_what_becomes_of_a_key(said: str, becomes: dict[str, Any]) -> None:
    assert placed(said) == becomes


@pytest.mark.parametrize(
    ("command", "printed", "code"),
    [
        ("export A=1", "1|end", 0),
        ("\nif false\nthen\n  exit 3\nfi\nexport A='it'\\''s \\t'\n", "it's \\t|end", 0),
        ("cat <<'E'\nhere it's\nE\nexport A=1 \\\n  B=2\n", "here it's\n1|end", 0),
        ("export A=1\nfalse\nexport A=2", "", 1),
    ],
)
def test_a_command_before_the_run_is_that_of_the_file(command: str, printed: str, code: int) -> None:
    (line,) = placed(f"slurm.pre_run_command = {json.dumps(command)}")["slurm.setup"]
    assert SlurmConfig(setup=(line,)).setup == (line,)
    text = f'{line}\n[ $? = 0 ] || exit 9\nfalse\nprintf "%s|end" "$A"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (printed, code)


def test_without_vllm_an_engine_has_one_device() -> None:
    """machines.py 3"""
    said = SEVERAL + "inference.parallel.tp = 4"
    of_all = {"trainer.nodes": 2, "trainer.gpus": 8, "inference.nodes": 1, "inference.gpus": 8}
    assert placed(said, "embedded") == of_all
    without = translate(tables(said), "embedded").without_effect
    assert without == ("inference.parallel.tp = 4 (of vLLM, and the embedded engine samples)",)
    own = {"inference": {"vllm": {"max_num_seqs": 8}}}  # by an option: Quartet has the same key
    without = translate(tables(SEVERAL), "embedded", own=own).without_effect
    assert without == ("inference.vllm.max_num_seqs = 8 (of vLLM, and the embedded engine samples)",)
    assert not translate(tables(SEVERAL), "vllm", own=own).without_effect


def test_without_vllm_one_device_of_each_is_whatever_there_is() -> None:
    """machines.py 3"""
    one_each = "deployment = { num_train_gpus = 1, num_infer_gpus = 1 }"
    assert placed(one_each, "embedded") == {}
    assert placed(one_each, "embedded", has_two_gpus=True) == ON_ONE
    of_one_gpu = SEVERAL + "deployment.gpus_per_node = 1"
    assert placed(of_one_gpu, "embedded") == {"trainer.nodes": 2, "inference.nodes": 1}
    run = translate(tables(of_one_gpu), "embedded")
    without = "deployment.gpus_per_node = 1 (without vLLM both take the GPU, or the CPU)"
    assert run.without_effect == (without,)
    said = SEVERAL + "deployment.gpus_per_node = 1\nslurm = {}"
    assert placed(said, "embedded")["slurm.gpus_per_node"] == 1, "nobody else says what the job asks for"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ('deployment.type = "ray"', 'type = "ray" is refused: choose "single_node" or "multi_node"'),
        ('deployment.type = "multi_node"', "num_train_nodes = null is refused: say how many machines"),
        ("deployment.num_train_nodes = 2", 'write type = "multi_node" with it, or remove it'),
        ("deployment.num_infer_replicas = 2", 'write type = "multi_node" with it, or remove it'),
        (SEVERAL + "deployment.num_infer_nodes = 0", "num_infer_nodes = 0 is refused: a run here samples"),
        (SEVERAL + "deployment.num_infer_replicas = 0", "should be a whole number from 1 on"),
        (SEVERAL + "deployment.gpus_per_node = 0", "should be a whole number from 1 on"),
        ('deployment = { type = "multi_node", num_train_nodes = "x" }', "should be a whole number from 1 on"),
        (SEVERAL + "deployment.num_nodes = 3", "deployment.num_nodes = 3 is refused: did you mean"),
        (SEVERAL + "deployment.num_teacher_nodes = 1", "a teacher is a table of Quartet's own"),
        (
            SEVERAL + 'deployment.num_infer_nodes = 1\ninference.deployment.type = "multi_node"',
            "num_nodes = 2 is refused: deployment.num_infer_nodes says otherwise",
        ),
        (
            SEVERAL + 'inference.deployment = { type = "disaggregated", prefill_nodes_per_replica = 2 }',
            "every engine both reads and answers",
        ),
        (
            SEVERAL + "inference.parallel.tp = 3",
            "inference.parallel.tp = 3 is refused: an engine is on one machine; give what divides prime-rl's",
        ),
        (SEVERAL + "inference.parallel.tp = 16", "an engine is on one machine"),
        (SEVERAL + "inference.parallel.dp = 3", "each of the 1 machines has 8 engines; leave dp out"),
        (
            SEVERAL + "deployment.num_infer_nodes = 2\ninference.vllm_extra.enable_expert_parallel = true",
            "inference.vllm_extra.enable_expert_parallel = true is refused: an engine and its experts are on",
        ),
        (
            'inference.deployment.type = "multi_node"\ndeployment.num_infer_gpus = 4',
            'inference.deployment.type = "multi_node" is refused: [deployment] has one machine',
        ),
        ("inference.deployment.num_nodes = 4", 'write type = "multi_node" with it'),
        ('inference.deployment.type = "x"', 'choose "single_node" or "multi_node"'),
        ("inference.deployment = 3", "inference.deployment = 3 is refused: should be a table"),
        ("slurm = 3", "slurm = 3 is refused: should be a table"),
        ("trainer.model.cp = 2", "cp = 2 is refused: the trainer's devices are 1; set"),
        (
            "trainer.model.cp = 3\ntrainer_gpu_ids = [0, 1]",
            "cp = 3 is refused: the trainer's devices are 2; set it to what divides that",
        ),
        ("trainer.model.cp = 2\ndeployment.num_train_gpus = 0", "the trainer's devices are 0; set it"),
        ('trainer.experimental."a\\nb" = 1', "experimental.a\\nb = 1 is refused: it is of prime-rl's own"),
        ('slurm.template_path = "my.j2"', 'template_path = "my.j2" is refused: the script is Quartet'),
        ("slurm.nodelist = 3", "slurm.nodelist = 3 is refused: should be text in quotes"),
        ('slurm.pre_run_command = ["a"]', "should be text in quotes"),
        ("slurm.node_list = 'a'", "did you mean 'slurm.nodelist'?"),
        ("deployment.gpus_per_node = 4\nslurm.gpus_per_node = 8", "deployment.gpus_per_node says otherwise"),
    ],
)  # fmt: skip
def test_refusals(said: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(tables(said), "vllm")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value), "one thing is wrong, and told once"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("deployment.gpus_per_node = 4", "deployment.gpus_per_node = 4 (this machine has as many as it has)"),
        (
            SEVERAL + "deployment.num_infer_gpus = 4",
            "deployment.num_infer_gpus = 4 (of one machine; each of several has gpus_per_node)",
        ),
        (
            SEVERAL + "inference.deployment.gpus_per_node = 4",
            "inference.deployment.gpus_per_node = 4 (that of [deployment] decides)",
        ),
        (
            SEVERAL + "inference.deployment.backend_port = 8100",
            "inference.deployment.backend_port = 8100 (services find each other)",
        ),
        (
            'inference.slurm.job_name = "j"',
            'inference.slurm = {"job_name": "j"} (inference is in the job of the run, which [slurm] is of)',
        ),
        ("slurm.dry_run = true", "slurm.dry_run = true (there is --dry-run)"),
        ("slurm.shared_fs = false", "slurm.shared_fs = false (a job installs nothing)"),
        ("slurm.launch_modelexpress = false", "slurm.launch_modelexpress = false (weights travel over gRPC)"),
        (
            "slurm.hf_hub_offline = true",
            "slurm.hf_hub_offline = true (services inherit the environment: set it where the command is "
            "given)",
        ),
        (
            "slurm.max_requeues = 3",
            "slurm.max_requeues = 3 (a job is queued again at its time limit, not where its run failed)",
        ),
        (
            "slurm.step_timeout = 60",
            "slurm.step_timeout = 60 (the orchestrator's stalled_after_seconds tells of a run that stands "
            "still)",
        ),
        ("slurm.nodes_per_fsdp_group = 1", "slurm.nodes_per_fsdp_group = 1 (ranks share the model by FSDP2)"),
        ('base_dir = "."', 'base_dir = "." (a job runs in the folder that it is queued from)'),
    ],
)
def test_what_has_no_effect_is_told(said: str, told: str) -> None:
    assert translate(tables(said), "vllm").without_effect == (told,)


def test_where_services_run_already_none_of_it_is_read() -> None:
    run = translate(tomllib.loads(MACHINES), "vllm", starts_services=False)
    assert "slurm" not in run.tables and "nodes" not in run.tables["inference"]
    told = [
        line
        for line in run.without_effect
        if line.endswith("(where the services are, they have their devices)")
    ]
    assert [line.partition(" = ")[0] for line in told] == ["deployment", "slurm", "inference.deployment"]
    old = translate(
        tables('num_train_nodes = 2\njob_name = "j"\nslurm_template = "t"'), starts_services=False
    )
    assert len(old.without_effect) == 3


# The two [slurm].


def test_no_key_of_our_slurm_is_taken_for_one_of_prime_rl() -> None:
    ours = frozenset(SlurmConfig.model_fields)
    assert not ours & INSIDE["slurm"]
    assert ours == OF_BOTH_SLURMS | OF_OUR_SLURM


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('[slurm]\npartition = "p"\naccount = "a"\ntime = "1:00:00"\n', Form.OURS),
        ('[slurm]\nsetup = ["a"]\n', Form.OURS),
        ('[slurm]\npre_run_command = "a"\n', Form.THEIRS),
        ('[slurm]\npre_run_command = "a"\nqos = "high"\n', Form.MIXED),
        (MACHINES.replace("[slurm]", '[slurm]\nqos = "high"'), Form.MIXED),
        ("[trainer]\nnodes = 2\n[trainer.optim]\nlr = 1e-5\n", Form.MIXED),
        ("[inference]\nnodes = 2\n", Form.OURS),
        (MACHINES, Form.THEIRS),
    ],
)
def test_a_table_slurm_is_known_by_its_keys(text: str, form: Form) -> None:
    assert form_of(tomllib.loads(text))[0] is form


def loaded(folder: Path, *options: str, text: str = MACHINES) -> RunFile:
    file = folder / "theirs.toml"
    file.write_text(text)
    return load_run(["@", str(file), *options])


def gpus_of(found: RunFile) -> int | None:
    """What a job asks for on each machine."""
    services = {name: getattr(found.config, name) for name in ("trainer", "inference")}
    return found.config.slurm.gpus_per_node or script.gpus_of(services)


def test_options_of_either_slurm(tmp_path: Path) -> None:
    """form.py 3: what only prime-rl has is its own, all else is Quartet's, and wins."""
    theirs = loaded(tmp_path, "--slurm.nodelist", "n07", "--slurm.pre-run-command=date")
    assert theirs.options == []
    assert theirs.config.slurm.options == ("--nodelist=n07", "--exclude=n03")
    assert theirs.config.slurm.setup == ("date",)
    ours = [
        "--slurm.partition",
        "gpu",
        "--slurm.account",
        "mine",
        "--slurm.qos",
        "high",
        "--slurm.options",
        '["--x=1"]',
    ]
    found = loaded(tmp_path, *ours)
    assert found.options == ours
    slurm = found.config.slurm
    assert (slurm.partition, slurm.account, slurm.qos, slurm.options) == ("gpu", "mine", "high", ("--x=1",))
    assert (slurm.job_name, slurm.time) == ("math-30b", "24:00:00")
    assert gpus_of(loaded(tmp_path, "--trainer.gpus=4", "--inference.gpus=4")) == 4
    assert loaded(tmp_path, "--deployment.num-infer-replicas", "3").config.inference["nodes"] == 6
    assert loaded(tmp_path, "--inference.nodes", "3", "--trainer.nodes=1").config.inference["nodes"] == 3


def test_files_of_both_compose(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "slurm.toml", tmp_path / "ours.toml"
    theirs.write_text('[deployment]\nnum_infer_replicas = 1\n[slurm]\ntime = "2:00:00"\n')
    ours.write_text('[slurm]\npartition = "gpu"\nrequeue_at_time_limit = false\n')
    config = loaded(tmp_path, "@", str(theirs), f"@{ours}").config
    assert config.inference["nodes"] == 2
    assert (config.slurm.time, config.slurm.partition) == ("2:00:00", "gpu")
    assert (config.slurm.job_name, config.slurm.requeue_at_time_limit) == ("math-30b", False)


def test_what_dry_run_shows_is_a_file_of_ones_own(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    assert validate(RunConfig, tomllib.loads(found.toml)) == found.config
    assert form_of(tomllib.loads(found.toml))[0] is Form.OURS


def test_a_refusal_of_slurm_names_the_key_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.time = .*\(in slurm\.time of .*theirs\.toml\) is refused"):
        loaded(tmp_path, text=MACHINES.replace("24:00:00", "a day"))
    with pytest.raises(ConfigError, match=r"slurm\.options.* \(in slurm\.nodelist of .*theirs\.toml\)"):
        loaded(tmp_path, text=SOURCES + '[slurm]\nnodelist = """a\nb"""\n')


@pytest.mark.parametrize("text", [CLASSIC, TASKSETS, SOURCES])
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_file_of_one_machine_says_nothing_of_machines(text: str, engine: Any) -> None:
    run = translate(tomllib.loads(text), engine)
    assert "slurm" not in run.tables
    assert not any("nodes" in run.tables.get(service, {}) for service in ("trainer", "inference"))


def test_sequences_are_whole_where_one_process_trains() -> None:
    """Without vLLM nobody says how many devices there are."""
    run = translate(tables("trainer.model.cp = 2"), "embedded")
    assert run.tables["trainer"].keys() == {"gradient_checkpointing", "optimizer_offload"}
    assert any(
        line.startswith("trainer.model.cp = 2 (a trainer that is given no") for line in run.without_effect
    )
    elsewhere = translate(tables("trainer.model.cp = 2"), "vllm", starts_services=False)
    told = "trainer.model.cp = 2 (where the services are, they have their devices)"
    assert told in elsewhere.without_effect


@pytest.mark.parametrize("devices", ['deployment.num_train_gpus = "2"', 'trainer_gpu_ids = "0,1"'])
def test_devices_that_are_no_number_are_left_to_whoever_gives_them_out(devices: str) -> None:
    run = translate(tables(f"trainer.model.cp = 2\n{devices}"), "vllm")
    assert isinstance(run.tables["trainer"]["gpus"], str)
