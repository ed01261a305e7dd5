"""A job of `quartet rl`: the run, its name, and its output folder.

1. `plan` only looks: it refuses a folder that holds something else, with the remedy, and changes nothing. How
   the folder becomes the job's own: attempt.py.
2. A folder whose run was never accepted is as free as an empty one.
3. A run that is completed goes on with a larger max_steps, and any with other settings of how it is carried
   out (quartet/run/operation.py). The folder has that of what the orchestrator has accepted: `write_down`
   comes after it, so that a refusal changes nothing.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

from quartet.cli.begun_by import RELEASE, is_of_a_fine_tuning, of_another_release, own_release
from quartet.cli.dialects import items
from quartet.cli.held import LOCK
from quartet.cli.outputs import CHECKPOINT, PRIVATE, write_json, write_text
from quartet.cli.overwritten import FAILED_LOGS, is_kept
from quartet.cli.summary import is_completed, summary_of
from quartet.cli.told_to_change import to_say_again
from quartet.cli.whole_weights import lacking
from quartet.config import ConfigError
from quartet.local.hosts import HERE, NODES, Hosts
from quartet.local.plan import read_plan
from quartet.local.toml_text import dumps
from quartet.local.wiring import SERVICES
from quartet.run.config import SHOWN, RunConfig, parse_run
from quartet.run.name import RULE, is_run_id
from quartet.run.operation import carried_out_as, differences
from quartet.run.written_out import is_same_run

RECORD = "run.json"
#: In the folder of each saved state.
MARK = "COMPLETE.json"
#: Of the record: whether the orchestrator has had the run.
ACCEPTED = "accepted"
#: The run with its services, as it was begun or extended: whoever names it goes on with the same.
RUN_FILE = "run.toml"
# Of a configuration, that are told.
MAX_DIFFERENCES = 10
# Any of these is a tokenizer that transformers can load.
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt")
# A name, or an owner and one.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Words:
    """How whoever asks for a job says what refusals advise."""

    resume: str
    overwrite: str
    elsewhere: str
    run_id: str
    #: With "{folder}" in it, and "{arguments}" where the command has some of the run's.
    go_on: str
    #: Whether the run's own file may be named in the place of all that was said (RUN_FILE).
    by_file: bool = True
    #: What begins a run with the state of another; with "{folder}" in it.
    begin_with: str = "initial_state = {folder!r}"
    #: What whoever said something else does.
    say_again: str = "say it as it was"
    #: What is said of the run, by files and by options.
    arguments: tuple[str, ...] = ()

    def going_on(self, folder: Path, error: str = "") -> str:
        """How a run that ended early is gone on with, by an error perhaps that told to change an option."""
        again = shlex.join(to_say_again(self.arguments, error))
        return self.go_on.format(folder=shlex.quote(str(folder)), arguments=again)

    def as_it_was(self, folder: Path, max_steps: int | None = None) -> str:
        """How one goes on with a run by what it was begun with."""
        return as_it_was(folder, max_steps) if self.by_file else f": {self.going_on(folder)}"


FLAGS = Words(
    resume="--resume",
    overwrite="--overwrite",
    elsewhere="another --output-dir",
    run_id="--run-id",
    go_on="quartet rl ... --output-dir {folder} --resume",
)


@dataclass(frozen=True)
class Job:
    """A run and where it lives."""

    config: RunConfig
    run_id: str
    folder: Path
    resumed: bool = False
    #: Whether it was completed, and goes on with more steps.
    extended: bool = False
    #: Whether it goes on with other settings, of those that decide nothing of what it computes.
    carried_out_otherwise: bool = False
    overwrite: bool = False
    words: Words = FLAGS
    #: Where its services run.
    hosts: Hosts = HERE

    @property
    def config_toml(self) -> str:
        """The run as the orchestrator gets it: without the deployment and without where it is shown, so other
        ports are the same run, and so is another project of Weights & Biases."""
        return dumps(self.config.model_dump(mode="json", exclude={*SERVICES, *SHOWN}, exclude_none=True))


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder, also where an attempt to overwrite it was killed."""
    record = folder / RECORD
    return (record.is_file() and not is_of_a_fine_tuning(record)) or is_kept(folder, RECORD)


def as_it_was(folder: Path, max_steps: int | None = None) -> str:
    """The command that goes on with the run of a folder, to more steps where they are given; nothing where an
    earlier release began it."""
    file = folder / RUN_FILE
    longer = () if max_steps is None else ("--max-steps", str(max_steps))
    more = (*longer, *hosts_before(folder))
    command = ("quartet", "rl", "@", str(file), *more, "--output-dir", str(folder), "--resume")
    return f": {shlex.join(command)}" if file.is_file() else ""


def hosts_before(folder: Path) -> tuple[str, ...]:
    """The options that say on which machines the run of a folder was, if on several."""
    try:
        plan = read_plan(folder)
    except ConfigError:
        return ()
    if plan is None:
        return ()
    names, trainers = plan.hosts.names, plan.hosts.trainers
    placed = ("--hosts", ",".join(names), "--first-port", str(plan.hosts.first_port))
    # The run's own file has those that it began with, on one machine perhaps.
    nodes = {"trainer": trainers, "inference": len(names) - trainers}
    return (*placed, *(f"--{service}.{NODES}={count}" for service, count in nodes.items()))


def model_path(model: str) -> str:
    """The absolute path of a model folder, or of a hub id's folder in the cache. Raises ConfigError."""
    folder = Path(os.path.expanduser(model))  # which leaves a user that is not here as it is
    if (folder / "config.json").is_file():
        return _whole(model, folder)
    if folder.is_file():
        raise ConfigError(f"model = {model!r} is a file; name the folder of a Hugging Face model")
    if folder.exists():
        raise ConfigError(f"model = {model!r} has no config.json; {_inside(folder)}")
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    cached = hub / f"models--{model.replace('/', '--')}"
    if (main := cached / "refs" / "main").is_file():
        snapshot = cached / "snapshots" / main.read_text().strip()
        if (snapshot / "config.json").is_file():
            return _whole(model, snapshot)
    neither = "neither a folder here nor a model in the Hugging Face cache"
    here = "" if folder.is_absolute() else f" (here is {Path.cwd()})"
    raise ConfigError(f"model = {model!r} is {neither}{here}; {_instead(folder)}")


def _inside(folder: Path) -> str:
    """What to name in the place of a folder that is there: a model in it, such as the checkpoint of a run."""
    found = (folder.glob("*/config.json"), folder.glob(f"*/{CHECKPOINT}/config.json"))
    models = [str(config.parent) for files in found for config in sorted(files)]
    if models:
        return f"did you mean {models[0]!r}?"
    if (folder / "adapter_config.json").is_file():
        merged = f", such as {str(folder.parent)!r}" if (folder.parent / "config.json").is_file() else ""
        return f"it is an adapter; name the folder of a whole model{merged}"
    if (folder / RECORD).is_file():
        return f"it is of a run that wrote no model: {_exported(folder)}"
    return "name a Hugging Face model folder"


def _instead(folder: Path) -> str:
    """What to do about a model that is not there."""
    beside = folder.parent
    models = [str(config.parent) for config in beside.glob("*/config.json")] if beside.is_dir() else []
    if close := difflib.get_close_matches(str(folder), models, n=1):
        return f"did you mean {close[0]!r}?"
    if (beside / RECORD).is_file():
        return f"its run wrote no model: {_exported(beside)}"
    is_of_a_hub = _HUB_ID.fullmatch(str(folder)) is not None
    had = f"fetch it with 'hf download {folder}'" if is_of_a_hub else "name a Hugging Face model folder"
    made = f"quartet model tiny {shlex.quote(str(folder))}"
    return had + (f", or make a toy in that folder with '{made}'" if beside.is_dir() else "")


def _exported(run: Path) -> str:
    return f"'quartet export {shlex.quote(str(run))} MODEL_FOLDER' writes its newest"


def _whole(model: str, folder: Path) -> str:
    """The absolute path of a folder that has weights and a tokenizer. Raises ConfigError."""
    needed = {"weights (*.safetensors)": ("*.safetensors",), "tokenizer (tokenizer.json)": TOKENIZER_FILES}
    missing = [what for what, patterns in needed.items() if not any(any(folder.glob(p)) for p in patterns)]
    if missing:
        raise ConfigError(
            f"model = {model!r} has no {' and no '.join(missing)} in {folder.absolute()}; "
            "copy what is missing there, or name a whole model folder"
        )
    if lack := lacking(folder):
        raise ConfigError(f"model = {model!r} {lack} ({folder.absolute()})")
    return str(folder.absolute())


def default_folder(arguments: list[str], name: str | None = None) -> Path:
    """outputs/<name>-<time>, whatever is in the name, which is by default that of the last file that is no
    table's."""
    files = [one.file for one in items(arguments) if one.file and not one.key]
    name = name or (Path(files[-1]).stem if files else "run")
    return Path("outputs") / f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


def plan(
    config: RunConfig,
    folder: Path,
    run_id: str | None,
    *,
    resume: bool,
    overwrite: bool,
    words: Words = FLAGS,
) -> Job:
    """The job, if its folder can be taken. Raises ConfigError."""
    if resume:
        job = resumed(config, folder, words)
        if run_id not in (None, job.run_id):
            raise ConfigError(
                f"{words.run_id} {run_id!r}: {folder} holds the run {job.run_id!r}; leave it out"
            )
        return job
    above = next((part for part in (folder, *folder.absolute().parents) if part.exists()), folder)
    if above.exists() and not above.is_dir():
        raise ConfigError(f"output folder {folder}: {above} is a file; name {words.elsewhere}")
    if above.exists() and not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"output folder {folder}: {above} may not be written; name {words.elsewhere}")
    check_free(folder, words, overwrite=overwrite)
    run_id = run_id or re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)[:64]
    if not is_run_id(run_id):
        raise ConfigError(f"{words.run_id} {run_id!r} is refused: {RULE}")
    return Job(config, run_id, folder, overwrite=overwrite, words=words)


def check_free(folder: Path, words: Words, *, overwrite: bool) -> None:
    """Whether a new run may have the folder. Raises ConfigError."""
    if not folder.exists() or all(entry.name in (LOCK, FAILED_LOGS) for entry in folder.iterdir()):
        return
    if not is_kept(folder, RECORD) and not was_accepted(folder):
        return
    if not holds_run(folder):
        asked = f"{words.overwrite}: {folder}" if overwrite else f"output folder {folder} is not empty, and"
        raise ConfigError(f"{asked} was not written by quartet rl; name {words.elsewhere}")
    if not overwrite:
        raise ConfigError(
            f"output folder {folder} is not empty; add {words.resume} to go on with its run, "
            f"{words.overwrite} to delete it, or name {words.elsewhere}"
        )


def resumed(config: RunConfig, folder: Path, words: Words) -> Job:
    record = folder / RECORD
    if not record.exists() or is_of_a_fine_tuning(record):
        raise ConfigError(f"{words.resume}: {folder} holds no run; name {words.elsewhere}, that of one")
    try:
        known = json.loads(record.read_text())
        run_id, config_toml = str(known["run_id"]), str(known["config_toml"])
        begun = parse_run(config_toml)
    except ConfigError as error:
        whose = of_another_release(record, error)
        raise ConfigError(f"{words.resume}: {whose}; go on with that, or {_anew(folder, words)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{words.resume}: {record} cannot be read ({error}); start a new run in {words.elsewhere}"
        ) from error
    job = Job(config, run_id, folder, resumed=True, words=words)
    # Parsed: a newer release may write more defaults down.
    after = parse_run(job.config_toml)
    if after.max_steps > begun.max_steps:
        _check_completed(job, begun.max_steps)
        job = replace(job, extended=True)
        begun = begun.model_copy(update={"max_steps": after.max_steps})
    otherwise = carried_out_as(begun, after)
    job = replace(job, carried_out_otherwise=not is_same_run(begun, otherwise))
    if differing := differences(otherwise, after):
        told, rest = differing[:MAX_DIFFERENCES], len(differing) - MAX_DIFFERENCES
        more = f" and {rest} more" if rest > 0 else ""
        raise ConfigError(
            f"{words.resume}: {folder} holds the run {job.run_id!r} with another configuration: "
            f"{', '.join(told)}{more}; {_anew(folder, words)}, or {words.say_again}"
            f"{words.as_it_was(folder, after.max_steps if job.extended else None)}"
        )
    return job


def _anew(folder: Path, words: Words) -> str:
    """What to do instead of going on with the run of a folder by other settings."""
    kept = folder / "data" / "trainer"  # by default; elsewhere they are not looked for
    has_none = kept.is_dir() and not any(kept.glob(f"*/*/{MARK}"))
    if has_none or summary_of(folder).get("steps") == 0:
        return (
            f"start a new run in {words.elsewhere}, or with {words.overwrite} in place of this one (which "
            "has no saved state to begin with)"
        )
    return (
        f"start a new run in {words.elsewhere} ({words.begin_with.format(folder=str(folder))} begins with "
        "the weights and the moments of this one)"
    )


def _check_completed(job: Job, max_steps: int) -> None:
    """Whether a run of so many steps may be made longer. Raises ConfigError."""
    if not is_completed(summary_of(job.folder), max_steps):
        raise ConfigError(
            f"{job.words.resume}: max_steps was {max_steps} and is {job.config.max_steps}, and a run is made "
            f"longer once it is completed; let the run {job.run_id!r} go on as it was"
            f"{job.words.as_it_was(job.folder)}"
        )


def was_accepted(folder: Path) -> bool:
    """Whether the run of a folder was, as far as its record says: earlier releases wrote none before that."""
    try:
        return bool(json.loads((folder / RECORD).read_text()).get(ACCEPTED, True))
    except (OSError, ValueError, AttributeError):
        return True


def write_down(job: Job, *, accepted: bool) -> None:
    """Say whose the folder is. Cut short it leaves, of a run that is not accepted yet, a folder that is free,
    and of one that is, the run as it goes on."""
    begun = dumps(job.config.model_dump(mode="json", exclude_none=True))
    record = {"run_id": job.run_id, ACCEPTED: accepted, RELEASE: own_release()}
    record["config_toml"] = job.config_toml
    if accepted:
        write_text(job.folder / RUN_FILE, begun, PRIVATE)
    write_json(job.folder / RECORD, record, PRIVATE)
    if not accepted:
        write_text(job.folder / RUN_FILE, begun, PRIVATE)
