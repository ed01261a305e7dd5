"""`quartet sft`: starts a trainer here, trains a model on a file of chats, and writes the model's folder.

1. Whatever can be refused is refused before anything starts, with exit code 2. Only what the trainer says of
   the model comes later (of an adapter's targets, say); the folder of a new fine-tuning is then removed.
2. Where it ends early, what was saved is kept, and how to go on from there is said. The first Ctrl-C saves
   the step under way (stopping.py), and the exit code is 130.
3. One that goes on is what its folder says (sft.toml), where no file is named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from quartet.cli import exits
from quartet.cli.adapter_fit import misfits
from quartet.cli.begun_by import of_another_release
from quartet.cli.dialects import items
from quartet.cli.dry_run import told_of_sft
from quartet.cli.held import remove
from quartet.cli.initial_adapter import with_adapter
from quartet.cli.job import model_path
from quartet.cli.outputs import PRIVATE, take_model, write_text
from quartet.cli.overwritten import LOGS
from quartet.cli.reporting import Reporters, reporting
from quartet.cli.reporting import check as check_reporting
from quartet.cli.run_tables import check_keeping
from quartet.cli.sft import tokenized
from quartet.cli.sft.arguments import OUTPUT
from quartet.cli.sft.file import SftFile, load_sft
from quartet.cli.sft.place import (
    CHECKPOINT,
    RECORD,
    TUNING_FILE,
    begun_keep_last,
    begun_lora,
    check_place,
    contents_of,
    in_full,
    taken,
)
from quartet.cli.sft.reported import ending_of, looked_at, run_of
from quartet.cli.sft.sets import Sets, read_sets, told_of
from quartet.cli.sft.shown import Display, display
from quartet.cli.sft.steps import Refused, Training
from quartet.cli.sft.stopping import Stopped, going_on, heard, unless
from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.errors import QuartetError
from quartet.kit.channel import connect
from quartet.kit.folder import check_folder
from quartet.kit.standard_streams import say
from quartet.local.beside import AddressBook, beside
from quartet.local.child import ChildSpec
from quartet.local.deployment import check, write
from quartet.local.supervisor import ServiceFailed
from quartet.local.wiring import wire
from quartet.run.lora import LoraConfig
from quartet.run.sft import SftConfig
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

DRAIN_SECONDS = 2.0


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: `@ file.toml --key value`."""
    if options.overwrite:
        raise ConfigError(
            "--overwrite: no fine-tuning is overwritten; delete its folder yourself, or name another by "
            "--output-dir"
        )
    file = _loaded(options, rest)
    output: Path = (options.output_dir or file.output_dir or OUTPUT).absolute()
    check_keeping(file.config.trainer, begun_keep_last(output) if options.resume else None)
    config = file.config.model_copy(update={"model": model_path(file.config.model)})
    config = config.model_copy(update={"lora": _adapter(config, output if options.resume else None)})
    check_folder("--output-dir", output)
    if not options.dry_run:
        check_place(output, config, resume=options.resume)
    check_reporting(config)
    with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
        asyncio.run(check(_deploy(config, Path(scratch))))
    # The last to be refused: to read them may take hours.
    sets = read_sets(config, output / tokenized.FOLDER if options.resume else None)
    for line in told_of(config, sets):
        print(f"# {line}" if options.dry_run else line)
    if options.dry_run:
        print("", told_of_sft(config, sets.validation.steps), sep="\n", end="")
        return 0
    with taken(output, config, resume=options.resume, steps=sets.validation.steps):
        is_complete = (output / CHECKPOINT).exists()
        if not is_complete:  # first of all: by it, what is ended from here on goes on
            write_text(output / TUNING_FILE, told_of_sft(in_full(config), sets.validation.steps), PRIVATE)
        if contents_of(config) != sets.contents:
            if not options.resume:
                remove(output)
            said = "data or validation changed while it was read; begin again once nobody writes to it"
            raise ConfigError(said)
        if is_complete:
            return _report_again(config, sets, output)
        ended = _in_folder(config, sets, output, resume=options.resume, plain=options.plain)
    print(f"model and metrics: {output}" if ended.stopped is None else ended.stopped.told(output))
    if ended.shown:
        print(ended.shown)
    return exits.DONE if ended.stopped is None else exits.INTERRUPTED


def _loaded(options: argparse.Namespace, rest: list[str]) -> SftFile:
    """What the command line asks for; of a fine-tuning that goes on, what its folder says. Raises
    ConfigError."""
    folder: Path = options.output_dir or OUTPUT
    if not options.resume or any(one.file for one in items(rest)):
        return load_sft(rest, options.flags)
    if (file := folder / TUNING_FILE).is_file():
        try:
            begun = load_sft(["@", str(file)])
        except ConfigError as error:
            told = of_another_release(folder / RECORD, error)
            raise ConfigError(f"--resume: {told}; go on with that") from error
        return load_sft(["@", str(file), *rest], options.flags) if rest else begun
    try:
        return load_sft(rest, options.flags)
    except ConfigError as error:
        if not (folder / RECORD).is_file():
            why = f"--resume: {folder} holds no fine-tuning; name the folder of one with --output-dir"
            raise ConfigError(why) from error
        why = f"{folder} has no {TUNING_FILE}, which says it; give the keys that it was begun with"
        raise ConfigError(f"{error}\n--resume: {why}") from error


def _adapter(config: SftConfig, goes_on_in: Path | None) -> LoraConfig:
    """The [lora] of a fine-tuning, with what the adapter decides that it begins with. Raises ConfigError,
    also where that does not fit the model."""
    begun = None if goes_on_in is None else begun_lora(goes_on_in)
    lora = with_adapter(config.lora, begun)
    if begun is None and (refused := misfits(lora, Path(config.model))):
        raise together(refused)
    return lora


def _tell(line: str) -> None:
    say(line, sys.stdout)


def _deploy(config: SftConfig, folder: Path) -> list[ChildSpec]:
    """Write the trainer's config into a folder."""
    return write(wire(config.model, folder / "data", {"trainer": dict(config.trainer)}), folder)


@dataclass(frozen=True)
class _Ended:
    """How it ended in its folder."""

    #: Where it is shown, in a sentence.
    shown: str
    stopped: Stopped | None = None


def _in_folder(config: SftConfig, sets: Sets, output: Path, *, resume: bool, plain: bool) -> _Ended:
    """Train in a folder that is held."""
    steps, stopped = sets.validation.steps, None
    try:
        _keep_tokenized(sets, output)
        with (
            contextlib.closing(display(steps, plain=plain)) as seen,
            reporting(config, output, seen.say) as reporter,
        ):
            try:
                asyncio.run(_train(config, sets, output, reporter, seen))
            except Stopped as ended:
                stopped, steps = ended, ended.done or 0
            return _Ended(reporter.finish(ending_of(config, steps, stopped=stopped is not None)), stopped)
    except Refused:
        if not resume:
            remove(output)  # nothing was run: the next attempt finds no used folder
        raise
    except (KeyboardInterrupt, OSError, QuartetError, ServiceFailed):
        again = f"go on with: {going_on(output)}"
        print(f"{again} (from the newest saved state, or from the beginning)", file=sys.stderr)
        raise


def _keep_tokenized(sets: Sets, output: Path) -> None:
    """What is trained is no worse where there is no room for it."""
    folder = output / tokenized.FOLDER
    try:
        tokenized.keep(folder, sets.by_name)
    except OSError as error:
        print(
            f"the tokenized data are not kept in {folder} ({error.strerror}): to go on tokenizes them again",
            file=sys.stderr,
        )


async def _train(config: SftConfig, sets: Sets, output: Path, reporter: Reporters, seen: Display) -> None:
    """To its end. Raises Stopped, Refused, OSError, QuartetError, ServiceFailed."""
    listens = asyncio.Event()

    async def work(book: AddressBook) -> Path:
        listens.set()
        async with connect(book["trainer"][0]) as channel:
            stub = TrainerServiceStub(channel)  # type: ignore[no-untyped-call]
            training = Training(stub, config, sets.drawn, sets.validation, output, seen)
            done = await unless(asked, training.opened())
            reporter.begin(run_of(output, config))
            async with looked_at(reporter):
                return await training.finished(done, asked)

    seen.waiting(f"the trainer loads the model; logs are in {output / LOGS}")
    with heard(seen, output) as asked:
        training = beside(_deploy(config, output), work, drain_s=DRAIN_SECONDS)
        exported = await unless(asked, training, listens)
    take_model(exported, output / CHECKPOINT)


def _report_again(config: SftConfig, sets: Sets, output: Path) -> int:
    """Nothing is left to do of a fine-tuning but for what is lacking where it is shown."""
    run, ending = run_of(output, config), ending_of(config, sets.validation.steps)
    with reporting(config, output, _tell) as reporter:
        shown = reporter.catch_up(run.run_id, run.config_toml, ending)
    print(f"{output} is complete")
    if shown:
        print(shown)
    return 0
