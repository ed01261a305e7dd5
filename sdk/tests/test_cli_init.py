"""`quartet init`: what a workspace is, that every file of it is read, and that nothing is overwritten."""

from __future__ import annotations

import re
import resource
import tomllib
from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.eval.endpoints import read_endpoints
from quartet.cli.gepa.config import GepaConfig
from quartet.cli.init.command import workspace_files, write_workspace
from quartet.cli.run_file import load_run
from quartet.config import load
from quartet.run.config import RunConfig, parse_run

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {"alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle"}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    write_workspace(folder, vf_rl=True)
    return folder


def names(folder: Path) -> set[str]:
    return {file.stem for file in folder.glob("*.toml")}


def test_a_workspace_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 0
    shown = capsys.readouterr().out
    files = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*.*")}
    assert {"README.md", ".gitignore", "environments/.gitignore", "configs/endpoints.toml"} < files
    assert all(f"  {path}\n" in shown for path in files if (tmp_path / "mine" / path).is_file())
    assert names(tmp_path / "mine/configs/rl") == ENVIRONMENTS
    assert not (tmp_path / "mine/configs/vf-rl").exists()
    assert main(["init", str(tmp_path / "mine"), "--vf-rl"]) == 0
    assert names(tmp_path / "mine/configs/vf-rl") == ENVIRONMENTS
    again = capsys.readouterr().out
    assert "left alone, as they were there already: README.md, configs/endpoints.toml" in again
    assert "configs/rl/gsm8k.toml" in again.partition("left alone")[2]


def test_nothing_that_is_there_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "configs").mkdir()
    (tmp_path / "elsewhere").write_text("mine, too")
    (tmp_path / "configs" / "endpoints.toml").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".gitignore").symlink_to(tmp_path / "nowhere")
    assert main(["init"]) == 0
    assert (tmp_path / "README.md").read_text() == "mine"
    assert (tmp_path / "elsewhere").read_text() == "mine, too"
    assert not (tmp_path / "nowhere").exists()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.toml")}
    _, left = write_workspace(tmp_path, vf_rl=False)
    assert {tmp_path / path for path in left} > set(before)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.toml")}


def test_a_file_in_the_way_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").write_text("")
    assert main(["init", str(tmp_path)]) == 2
    assert f"error: {tmp_path}/configs" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "configs")]) == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.parametrize("environment", sorted(ENVIRONMENTS))
def test_every_run_is_read(environment: str, workspace: Path) -> None:
    text = (workspace / f"configs/rl/{environment}.toml").read_text()
    config = parse_run(text)
    assert [env.id for env in config.env] == [environment]
    assert f"hf download {config.model}\n" in text, "says how its model is had"
    # What stands there for two GPUs is a run, too.
    commented = text.partition("# On two GPUs")[2].partition("\n#\n")[2]
    on_gpus = tomllib.loads(text + re.sub(r"(?m)^# ?", "", commented))
    assert parse_run(text).lora.r == on_gpus["inference"]["vllm"]["max_lora_rank"]
    assert on_gpus["inference"]["gpus"] == on_gpus["trainer"]["gpus"] == 1


@pytest.mark.parametrize("environment", sorted(ENVIRONMENTS))
def test_every_run_of_vf_rl_is_read_as_such(
    environment: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = workspace / f"configs/vf-rl/{environment}.toml"
    found = load_run(["@", str(file)])
    assert "read as vf-rl" in capsys.readouterr().err
    assert [env.id for env in found.config.env] == [f"primeintellect/{environment}"]
    assert found.name == environment
    # Its own rule: whole micro-batches.
    args = tomllib.loads(file.read_text())["trainer"]["args"]
    assert args["batch_size"] % args["micro_batch_size"] == 0
    assert f"hf download {found.config.model}\n" in file.read_text()


def test_evaluations_and_prompts_are_read(workspace: Path) -> None:
    evals = {
        path.stem: load(EvalFileConfig, ["@", str(path)]).config
        for path in workspace.glob("configs/eval/*.toml")
    }
    assert {one.id for one in evals["all"].evals} == ENVIRONMENTS
    assert set(evals) == {"all", "reverse-text", "sweep"}
    prompts = {
        path.stem: load(GepaConfig, ["@", str(path)]).config for path in workspace.glob("configs/gepa/*.toml")
    }
    assert set(prompts) == {"reverse-text", "wiki-search"}
    known = read_endpoints(workspace / "configs/endpoints.toml")
    for config in (evals["all"], *prompts.values()):
        assert config.model in known
    for path in (*workspace.glob("configs/eval/*.toml"), *workspace.glob("configs/gepa/*.toml")):
        assert re.search(r"(?m)^model = .* # .*Qwen/", path.read_text()), "names a model that makes sense"


def test_what_the_repository_has_too_is_the_same() -> None:
    here = {path: source for path, source in workspace_files(vf_rl=True) if path.suffix == ".toml"}
    common = {path for path in here if (REPOSITORY / path).exists()}
    assert {"configs/endpoints.toml", "configs/eval/sweep.toml", "configs/gepa/reverse-text.toml"} <= set(
        map(str, common)
    )
    for path in common:
        assert here[path].read_bytes() == (REPOSITORY / path).read_bytes(), path


def test_the_package_brings_its_files() -> None:
    package = REPOSITORY / "sdk/src/quartet"
    project = tomllib.loads((REPOSITORY / "sdk/pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["quartet"]
    brought = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    files = {path for path in (package / "cli/init/files").rglob("*") if path.is_file()}
    assert files and files <= brought
    assert len(files) == len(list(workspace_files(vf_rl=True)))


def test_the_readme_names_commands_and_files_that_there_are(workspace: Path) -> None:
    text = (workspace / "README.md").read_text()
    for path in re.findall(r"`((?:configs|environments)[\w./-]*)`", text):
        assert (workspace / path).exists(), path
    for command in re.findall(r"(?m)^quartet .*?@ (\S+)", text):
        assert load(RunConfig, ["@", str(workspace / command)]).config.env


def test_what_found_no_room_is_no_file_that_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        assert main(["init", str(folder)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.match(rf"error: {folder}/\S+: File too large\n", capsys.readouterr().err)
    written, left = write_workspace(folder, vf_rl=False)
    assert written and not left
    assert all((folder / path).stat().st_size for path in written)
