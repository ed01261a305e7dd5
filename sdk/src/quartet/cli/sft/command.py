"""`quartet sft`: starts a trainer here, trains a model on a file of chats, and writes the model's folder.

1. Whatever can be refused is refused before anything starts, with exit code 2. Only what the trainer says of
   the model comes later (of an adapter's targets, say); the folder of a new fine-tuning is then removed.
2. Where it ends early, what was saved is kept, and how to go on from there is said.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quartet.cli.dry_run import told_of_sft
from quartet.cli.held import remove
from quartet.cli.initial_adapter import with_adapter
from quartet.cli.job import model_path
from quartet.cli.outputs import take_model
from quartet.cli.overwritten import LOGS
from quartet.cli.reporting import Reporters, reporting
from quartet.cli.reporting import check as check_reporting
from quartet.cli.run_tables import check_keeping
from quartet.cli.sft.arguments import OUTPUT
from quartet.cli.sft.batches import Batching, steps_of
from quartet.cli.sft.chats import Chats, read_chats
from quartet.cli.sft.file import load_sft
from quartet.cli.sft.place import CHECKPOINT, Record, begun_keep_last, begun_lora, contents_of, taken
from quartet.cli.sft.reported import ending_of, looked_at, run_of
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.shown import Display, display
from quartet.cli.sft.steps import Refused, Training
from quartet.cli.sft.validation import Validation, repeated
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
from quartet.run.sft import SftConfig
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub

DRAIN_SECONDS = 2.0


@dataclass(frozen=True)
class Sets:
    """What is learned, and what is only measured."""

    learned: Chats
    measured: Chats
    validation: Validation
    #: Of the files, from before they were read.
    contents: Record


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """The command. `rest` is what argparse left: `@ file.toml --key value`."""
    file = load_sft(rest, options.flags)
    output: Path = (options.output_dir or file.output_dir or OUTPUT).absolute()
    check_keeping(file.config.trainer, begun_keep_last(output) if options.resume else None)
    config = file.config.model_copy(update={"model": model_path(file.config.model)})
    lora = with_adapter(config.lora, begun_lora(output) if options.resume else None)
    config = config.model_copy(update={"lora": lora})
    check_folder("--output-dir", output)
    sets = _read(config)
    for line in _of_the_files(sets):
        print(f"# {line}" if options.dry_run else line)
    check_reporting(config)
    with tempfile.TemporaryDirectory(prefix="quartet-check-") as scratch:
        asyncio.run(check(_deploy(config, Path(scratch))))
    if options.dry_run:
        print("", told_of_sft(config, sets.validation.steps), sep="\n", end="")
        return 0
    with taken(output, config, resume=options.resume):
        if contents_of(config) != sets.contents:
            if not options.resume:
                remove(output)
            said = "data or validation changed while it was read; begin again once nobody writes to it"
            raise ConfigError(said)
        if (output / CHECKPOINT).exists():
            return _report_again(config, sets, output)
        shown = _in_folder(config, sets, output, resume=options.resume, plain=options.plain)
    print(f"model and metrics: {output}")
    if shown:
        print(shown)
    return 0


def _read(config: SftConfig) -> Sets:
    """Read the files. Raises ConfigError, for both where both are wrong."""
    found: dict[str, Chats] = {}
    contents: Record = {}
    with contextlib.suppress(OSError, ConfigError):  # which reading tells, of both
        contents = contents_of(config)
    refused: list[ConfigError] = []
    for key, file in (("data", config.data), ("validation", config.validation)):
        try:
            found[key] = (
                Chats(Shelf(), 0)
                if file is None
                else read_chats(
                    file, Path(config.model), config.roles, config.max_tokens, key, config.overlong
                )
            )
        except ConfigError as error:
            refused.append(error)
    if refused:
        raise together(refused)
    learned, measured = found["data"], found["validation"]
    steps = steps_of(config, learned.samples)
    validation = Validation(measured.samples, config.eval, steps, Batching.of(config))
    if measured.samples and not validation.is_ever_due:
        raise ConfigError(
            f"validation = {str(config.validation)!r} is never measured in {steps} steps: eval.before and "
            f"eval.after are false, and eval.interval = {config.eval.interval}; set eval.after to true, or "
            f"eval.interval from 1 to {steps - 1}"
        )
    return Sets(learned, measured, validation, contents)


def _of_the_files(sets: Sets) -> Iterator[str]:
    """What was found in the files."""
    learned, measured = sets.learned, sets.measured
    yield (
        f"{learned.counted}, {learned.covered} tokens to learn, "
        f"{learned.left_out} left out as too long; {sets.validation.steps} steps"
    )
    for notice in learned.notices:
        yield notice
    if not measured.samples:
        return
    yield (
        f"validation: {measured.counted}, {measured.covered} tokens to measure, "
        f"{measured.left_out} left out as too long"
    )
    if again := repeated(measured.samples, learned.samples):
        whose = f"{again} of its {measured.form.thing}s are among those to learn"
        yield f"validation: {whose}, so its loss tells less of others"
    for notice in measured.notices:
        if notice not in learned.notices:
            yield f"validation: {notice}"


def _tell(line: str) -> None:
    say(line, sys.stdout)


def _deploy(config: SftConfig, folder: Path) -> list[ChildSpec]:
    """Write the trainer's config into a folder."""
    return write(wire(config.model, folder / "data", {"trainer": dict(config.trainer)}), folder)


def _in_folder(config: SftConfig, sets: Sets, output: Path, *, resume: bool, plain: bool) -> str:
    """Train in a folder that is held. Where it is shown, in a sentence."""
    steps = sets.validation.steps
    try:
        with (
            contextlib.closing(display(steps, plain=plain)) as seen,
            reporting(config, output, seen.say) as reporter,
        ):
            asyncio.run(_train(config, sets, output, reporter, seen))
            return reporter.finish(ending_of(config, steps))
    except Refused:
        if not resume:
            remove(output)  # nothing was run: the next attempt finds no used folder
        raise
    except (KeyboardInterrupt, OSError, QuartetError, ServiceFailed):
        again = f"by the same command with --output-dir {shlex.quote(str(output))} --resume"
        print(f"go on {again}: from the newest saved state, or from the beginning", file=sys.stderr)
        raise


async def _train(config: SftConfig, sets: Sets, output: Path, reporter: Reporters, seen: Display) -> None:
    async def work(book: AddressBook) -> Path:
        async with connect(book["trainer"][0]) as channel:
            stub = TrainerServiceStub(channel)  # type: ignore[no-untyped-call]
            training = Training(stub, config, sets.learned.samples, sets.validation, output, seen)
            done = await training.opened()
            reporter.begin(run_of(output, config))
            async with looked_at(reporter):
                return await training.finished(done)

    seen.waiting(f"the trainer loads the model; logs are in {output / LOGS}")
    exported = await beside(_deploy(config, output), work, drain_s=DRAIN_SECONDS)
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
