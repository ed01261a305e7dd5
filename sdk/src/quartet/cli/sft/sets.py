"""What a fine-tuning learns, and what it only measures: read from files, or as its folder keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quartet.cli.sft import tokenized
from quartet.cli.sft.batches import Batching, Drawable, drawable, ends_of_passes, steps_of
from quartet.cli.sft.chats import Chats, read_chats
from quartet.cli.sft.place import CONTENTS, Record, contents_of, digest_in
from quartet.cli.sft.shelf import Shelf
from quartet.cli.sft.validation import Validation, repeated
from quartet.config import ConfigError
from quartet.config.refusals import gathered, together
from quartet.counted import counted
from quartet.run.sft import SftConfig


@dataclass(frozen=True)
class Sets:
    """What is learned, and what is only measured."""

    learned: Chats
    measured: Chats
    validation: Validation
    #: What of the first a step takes some of.
    drawn: Drawable
    #: Of the files, from before they were read.
    contents: Record
    #: Both sets, by the names by which a folder keeps them; None is what it keeps already.
    by_name: Mapping[str, Chats | None]


def read_sets(config: SftConfig, kept_in: Path | None = None) -> Sets:
    """Both, as far as they are not kept in a folder. Raises ConfigError, for both where both are wrong."""
    contents: Record = {}
    with contextlib.suppress(OSError, ConfigError):  # which reading tells, of both
        contents = contents_of(config)
    found: dict[str, Chats] = {}
    by_name: dict[str, Chats | None] = {}
    refused: list[ConfigError] = []
    for key in CONTENTS:
        file: Path | None = getattr(config, key)
        if file is None:
            found[key] = Chats(Shelf(), 0)
            continue
        digest = digest_in(contents, key)
        name = None if digest is None else tokenized.name_of(config, digest)
        chats = None if kept_in is None or name is None else tokenized.kept(kept_in, name)
        with gathered(refused):
            found[key] = chats or _read(config, key, file)
            if name is not None:
                by_name[name] = None if chats else found[key]
    if refused:
        raise together(refused)
    learned, measured = found["data"], found["validation"]
    drawn = drawable(config, learned.samples)
    return Sets(learned, measured, _validation(config, measured, drawn), drawn, contents, by_name)


def _read(config: SftConfig, key: str, file: Path) -> Chats:
    return read_chats(
        file,
        Path(config.model),
        config.roles,
        config.max_tokens,
        key,
        config.overlong,
        learns=config.learns,
        learn_prompts=config.learn_prompts,
    )


def _validation(config: SftConfig, measured: Chats, drawn: Drawable) -> Validation:
    """When the set is measured. Raises ConfigError where that is never."""
    steps = steps_of(config, drawn)
    passes = ends_of_passes(config, drawn, steps, config.eval.epochs)
    validation = Validation(measured.samples, config.eval, steps, Batching.of_samples(config), passes)
    if measured.samples and not validation.is_ever_due:
        raise ConfigError(
            f"validation = {str(config.validation)!r} is never measured in {counted(steps, 'step')}: "
            f"eval.before and eval.after are false, and eval.interval = {config.eval.interval}; set "
            "eval.after to true" + (f", or eval.interval from 1 to {steps - 1}" if steps > 1 else "")
        )
    return validation


def told_of(config: SftConfig, sets: Sets) -> Iterator[str]:
    """What was found in the files, a line each."""
    learned, measured = sets.learned, sets.measured
    yield (
        f"{learned.counted}, {counted(learned.covered, 'token')} to learn, "
        f"{learned.left_out} left out as too long; {counted(sets.validation.steps, 'step')}"
    )
    if config.packing == "best_fit":
        rows, tokens = len(sets.drawn), sum(sets.drawn.lengths)
        filled = tokens / (rows * config.max_tokens)
        yield f"{counted(rows, 'row')} of at most {config.max_tokens} tokens, {filled:.1%} full"
    yield from learned.notices
    if not measured.samples:
        return
    yield (
        f"validation: {measured.counted}, {counted(measured.covered, 'token')} to measure, "
        f"{measured.left_out} left out as too long"
    )
    if again := repeated(measured.samples, learned.samples):
        whose = f"{again} of its {measured.form.thing}s are among those to learn"
        yield f"validation: {whose}, so its loss tells less of others"
    for notice in measured.notices:
        if notice not in learned.notices:
            yield f"validation: {notice}"
