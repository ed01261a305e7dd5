"""What a script holds of model, tokenizer and environment, and what GRPOTrainer refuses."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quartet.grpo as vf
from planned_runs import accepted
from quartet.cli.progress import Progress
from quartet.cli.rl import prepared
from quartet.grpo.measuring import measured
from quartet.local.tether import tethered
from quartet.v1.orchestrator_service_pb2 import Run

HEAVY = ("torch", "transformers", "grpc", "numpy", "matplotlib", "rich", "verifiers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What looks like a model."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    for name in ("model.safetensors", "tokenizer.json"):
        (made / name).touch()
    return made


def trainer(folder: Path, **given: Any) -> vf.GRPOTrainer:
    model, tokenizer = vf.get_model_and_tokenizer(str(folder))
    usual = {"model": model, "env": vf.Environment("e"), "args": vf.grpo_defaults("r")}
    return vf.GRPOTrainer(**{**usual, "processing_class": tokenizer, **given})


def test_importing_it_imports_nothing_heavy() -> None:
    program = f"import sys, quartet.grpo; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_model_is_looked_for_when_it_is_named(folder: Path) -> None:
    model, tokenizer = vf.get_model_and_tokenizer(str(folder), use_liger=False)
    assert (model.folder, tokenizer.folder, model.use_liger, model.context) == (
        str(folder),
        str(folder),
        False,
        77,
    )
    assert trainer(folder).translated().config.inference["max_model_len"] == 77
    with pytest.raises(vf.ConfigError, match="'no/model' is neither a folder here nor a model in the"):
        vf.get_model_and_tokenizer("no/model")
    with pytest.raises(vf.ConfigError, match="model_kwargs: revision = 'main' is refused"):
        vf.get_model(str(folder), model_kwargs={"revision": "main"})
    placed = vf.get_model(str(folder), model_kwargs={"torch_dtype": "bfloat16"})
    assert any(
        "model_kwargs torch_dtype: without effect" in note
        for note in trainer(folder, model=placed).translated().notes
    )
    assert trainer(folder, model=str(folder)).model.folder == str(folder)
    for damaged, sentence in (('{"max', "config.json is not JSON"), ("[]", "config.json is no JSON object")):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(vf.ConfigError, match=sentence):
            trainer(folder)


def test_a_folder_may_be_named_by_a_path(folder: Path) -> None:
    model, tokenizer = vf.get_model_and_tokenizer(folder)
    assert (model.name, tokenizer.name) == (str(folder), str(folder))
    made = trainer(folder, model=folder)
    assert made.model.name == str(folder) and made.translated().config.model == str(folder)
    assert not any("not trained in place" in note for note in made.translated().notes)


@pytest.mark.parametrize("named", [None, 3, "", b"models/tiny"])
def test_what_names_no_model_and_no_environment_is_refused(named: Any) -> None:
    for get in (vf.get_model, vf.get_tokenizer, vf.get_model_and_tokenizer):
        with pytest.raises(
            vf.ConfigError, match=f"^model = {named!r} is refused: give a folder, or a hub id"
        ):
            get(named)
    if not isinstance(named, str):
        with pytest.raises(vf.ConfigError, match="name an environment, as text"):
            vf.load_environment(named)


def test_an_environment_is_looked_for_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        vf.ConfigError, match=r"env\.id = 'no-such-env': no package 'no_such_env' in .*env install"
    ):
        vf.load_environment("no-such-env")
    # A package of this interpreter, which need not be an environment for being found.
    env = vf.load_environment("pytest", split="test", sizes=[1, 2], nested={"a": True})
    assert env == vf.Environment("pytest", {"split": "test", "sizes": [1, 2], "nested": {"a": True}})
    for wrong in (None, object(), {1: 2}, [None], {"a": {"b": len}}):
        with pytest.raises(vf.ConfigError, match=r"load_environment\('pytest'\): x = .* cannot be handed to"):
            vf.load_environment("pytest", x=wrong)
        with pytest.raises(vf.ConfigError, match=r"Environment\('pytest'\): x = .* cannot be handed to"):
            vf.Environment("pytest", {"x": wrong})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": 3}, "model = int is refused: the services load the model themselves"),
        ({"processing_class": "m"}, "processing_class = str is refused"),
        ({"env": "reverse-text"}, "env = 'reverse-text' is refused"),
        ({"env": [1]}, "or a list of these"),
        ({"env": []}, "a run needs an environment"),
        ({"args": {"beta": 0}}, "args = dict is refused"),
        ({"callbacks": [print]}, "callbacks[0] = <built-in function print> is refused: give an object with"),
        ({"optimizers": (print, None)}, "(optimizers=...): there is no such argument; the trainer makes"),
        (
            {"train_dataset": []},
            "GRPOTrainer(train_dataset=...): there is no such argument; tasks and rewards",
        ),
        ({"reward_funcs": print}, "'from quartet.trl import GRPOConfig, GRPOTrainer'"),
        ({"env": None}, "env is missing"),
        ({"processing_clas": 1}, "did you mean 'processing_class'?"),
        ({"peft_config": 3}, "peft_config = 3 is no LoraConfig"),
        ({"peft_config": vf.LoraConfig(lora_alpha=None)}, "peft_config = LoraConfig has no lora_alpha"),
        ({"peft_config": vf.LoraConfig(lora_alpha="x")}, "lora.alpha = 'x' is refused: should be a number"),
        ({"peft_config": vf.LoraConfig(target_modules=5)}, "target_modules = 5 is refused: list the names"),
        ({"peft_config": vf.LoraConfig(target_modules=["q", 3])}, "target_modules = ['q', 3] is refused"),
        (
            {"env": [vf.Environment("e", python="/a"), vf.Environment("e", python="/b", name="f")]},
            "env: 'e' has one interpreter in a run, not '/a' and '/b'",
        ),
    ],
)
def test_what_a_trainer_refuses(folder: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(vf.ConfigError) as refused:
        trainer(folder, **given)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_a_tokenizer_of_transformers_is_taken_where_it_is_of_the_models_folder(folder: Path) -> None:
    trainer(folder, processing_class=SimpleNamespace(name_or_path=str(folder)))
    with pytest.raises(vf.ConfigError, match=r"leave it out, or load it from there"):
        trainer(folder, processing_class=SimpleNamespace(name_or_path=str(folder.parent)))


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    folder.rename(other)
    tokenizer = vf.get_tokenizer(str(other))
    other.rename(folder)
    with pytest.raises(vf.ConfigError, match="is the tokenizer of another model than"):
        trainer(folder, processing_class=tokenizer)


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2", "RANK": "0"}, {"RANK": "1"}])
def test_a_rank_of_a_launcher_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(vf.ConfigError, match=r"set args\.num_processes = 2, the ranks of its trainer"):
        trainer(folder)


def test_one_rank_of_a_launcher_is_a_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert trainer(folder).translated().config.batch_size == 32


def test_the_model_of_a_completed_run_is_saved_until_it_goes_on(folder: Path, tmp_path: Path) -> None:
    args = vf.grpo_defaults("r")
    args.output_dir = str(tmp_path / "run")
    made = trainer(folder, args=args)
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint" / "weights").touch()

    def stands_at(phase: str, ended_at: int, steps: int) -> None:
        (tmp_path / "run" / "summary.json").write_text(json.dumps({"phase": phase, "steps": ended_at}))
        row = {"train/reward": 0.5, "train/learning_rate": 1e-4}
        rows = [json.dumps({"step": step, **row}) for step in range(1, steps + 1)]
        (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(rows) + "\n")

    stands_at("completed", 3, 3)
    made.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "weights").exists()
    made.save_model(tmp_path / "run" / "checkpoint")  # where it is
    for taken in (tmp_path / "model" / "weights", tmp_path / "model" / "weights" / "in"):
        with pytest.raises(vf.ConfigError, match=r"save_model: .* cannot be written: "):
            made.save_model(taken)
    # Gone on with more steps, and then killed, or stopped.
    for phase, ended_at in (("completed", 3), ("stopped", 5)):
        stands_at(phase, ended_at, 5)
        with pytest.raises(vf.ConfigError, match="save_model: there is no run in"):
            made.save_model(tmp_path / "newest")
        with pytest.raises(vf.ConfigError, match=r"is not completed; write .* with 'quartet eval'$"):
            made.evaluate()
    assert not (tmp_path / "newest").exists()


def test_folders_are_refused_in_the_words_of_a_script(folder: Path, tmp_path: Path) -> None:
    args = vf.grpo_defaults("r")
    args.output_dir = str(tmp_path / "run")
    made = trainer(folder, args=args, env=vf.Environment("pytest", python=sys.executable))
    with pytest.raises(vf.ConfigError, match=r"^train\(resume_from_checkpoint=True\): .* holds no run"):
        made.train(resume_from_checkpoint=True)
    with pytest.raises(vf.ConfigError, match="it goes on from its own newest state"):
        made.train(resume_from_checkpoint=tmp_path / "checkpoint-500")
    with pytest.raises(vf.ConfigError, match="save_model: there is no run in"):
        made.save_model(tmp_path / "model")
    with pytest.raises(vf.ConfigError, match=r"save_model: there is no completed run in .*name a folder"):
        made.save_model()
    assert (made.state.global_step, made.state.max_steps, made.state.log_history) == (0, 500, [])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(vf.ConfigError, match=r"not written by quartet rl; name another args\.output_dir"):
        made.train()
    args.overwrite_output_dir = True
    with pytest.raises(vf.ConfigError, match=r"args\.overwrite_output_dir = True: .* was not written by"):
        made.train()
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_who_goes_on_with_other_arguments_is_told_in_the_words_of_a_script(
    folder: Path, tmp_path: Path
) -> None:
    """No command of a shell: what it would go on with is not what the script says."""
    args = vf.grpo_defaults("r")
    args.output_dir = str(tmp_path / "run")
    made = trainer(folder, args=args, env=vf.Environment("pytest", python=sys.executable))
    with accepted(prepared(made.translated().config, made.folder, "r", resume=False, overwrite=False)):
        pass

    def told() -> str:
        with pytest.raises(vf.ConfigError) as caught:
            made.train(resume_from_checkpoint=True)
        assert "quartet rl" not in str(caught.value) and "--" not in str(caught.value)
        return str(caught.value)

    args.run_name = ""
    assert made._run_id() is None, "as of no name at all: else it would be another one than that of the run"
    args.max_steps = 700
    how = "as it was: trainer.train(resume_from_checkpoint=True)"
    assert told().endswith(f"is made longer once it is completed; let the run 'r' go on {how}")
    args.max_steps, args.seed = 500, 3
    assert "with another configuration: seed was 42 and is 3; start a new run in another" in (said := told())
    assert '(args.overrides = {"initial_state": \'' in said
    assert said.endswith("give the arguments that made it so: trainer.train(resume_from_checkpoint=True)")


@pytest.mark.parametrize("begins", [True, False])
def test_a_run_that_did_not_begin_is_not_gone_on_with(
    begins: bool,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it was to overwrite is in the folder again: of that no callback hears."""
    args, heard = vf.grpo_defaults("r"), list[int]()
    args.output_dir, args.overwrite_output_dir = str(tmp_path / "run"), True
    hearing = SimpleNamespace(on_step_end=lambda _, state, control, **__: heard.append(state.global_step))
    env = vf.Environment("pytest", python=sys.executable)
    made = trainer(folder, args=args, env=env, callbacks=[hearing])

    def launch(job: Any, open_display: Any, *_: Any) -> None:
        display, progress = open_display(), Progress()
        if begins:
            progress.begin(Run(run_id=job.run_id))
        display.tick(progress, [])
        job.folder.mkdir()
        row = {"step": 1, "train/reward": 0.5, "train/learning_rate": 1e-4}
        (job.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("quartet.cli.rl.launch", launch)
    monkeypatch.setattr("quartet.cli.checked.check_services", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING, "quartet.grpo"), pytest.raises(KeyboardInterrupt):
        made.train()
    assert heard == ([1] if begins else [])
    then = "go on with trainer.train(resume_from_checkpoint=True)"
    assert caplog.messages[-1] == (
        f"stopped; {then if begins else 'it has not begun: begin it with trainer.train()'}"
    )


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (
            1,
            "what was done is kept; go on with quartet eval --resume 7\nerror: 4 rollouts failed and have no "
            "reward; see failures.jsonl, try them again with quartet eval --resume 7 -o 'my runs'",
            "evaluate: 4 rollouts failed and have no reward; see failures.jsonl, call trainer.evaluate() "
            "again",
        ),
        (1, "", "evaluate: nothing was said"),
        (2, "error: --output-dir /x: it may not be written", "args.output_dir /x: it may not be written"),
        (2, "a warning\nerror: a = 1\n  also: b = 2\n", "a = 1\n  also: b = 2"),
    ],
)
def test_what_an_evaluation_advises_is_told_in_the_words_of_a_script(
    code: int, said: str, told: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(subprocess, "run", ended)
    with pytest.raises((vf.ConfigError, vf.RunFailed)) as caught:
        measured(trainer(folder).translated().config, str(folder), tmp_path)
    assert str(caught.value) == told


def test_evaluations_of_one_moment_are_told_apart_and_die_with_their_script(
    tmp_path: Path, folder: Path
) -> None:
    """measuring.py 1, 2."""
    commands: list[list[str]] = []

    def play(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 2, "", "error: refused")

    for _ in range(3):
        with pytest.raises(vf.ConfigError, match=r"^refused$"):
            measured(trainer(folder).translated().config, str(folder), tmp_path, play)
    assert len({words[words.index("--run-id") + 1] for words in commands}) == 3
    assert all(tethered(words[words.index("-m") - 1 :]) == words for words in commands)


def test_what_verifiers_has_beside_training_is_pointed_at() -> None:
    with pytest.raises(
        AttributeError, match=r"SingleTurnEnv: Environment classes.* 'quartet env init my-env'"
    ):
        _ = vf.SingleTurnEnv
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = vf.nothing
    assert issubclass(vf.RunFailed, RuntimeError)
    assert all(hasattr(vf, name) for name in vf.__all__)


def test_what_is_logged_is_printed_once_however_often_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("quartet.grpo")
    own = logging.NullHandler()
    monkeypatch.setattr(logger, "handlers", [own])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    before = logger.level
    try:
        for level in ("debug", "INFO"):
            vf.setup_logging(level, "%(message)s!")
        logger.info("once")
        logger.debug("too much")
        assert len(logger.handlers) == 2 and logger.handlers[0] is own
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err == "once!\n"
