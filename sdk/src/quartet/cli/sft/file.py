"""The fine-tuning of a command line: `@ sft.toml --key value`, in Quartet's dialect or in that of prime-rl's
`sft`.

1. A file of prime-rl is known by its form (run/prime_rl/sft_form.py), which is said on stderr, with what has
   no effect here, also where it is refused. Its own keys may be options, too (`--optim.lr 1e-5`).
2. What is said in Quartet's keys is laid over what such files become, wherever it stands.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.cli.dialects import Asked, Dialect, Item, items, parted
from quartet.cli.run_file import place_of
from quartet.config import Config, ConfigError, load
from quartet.config.load import Draft, merged
from quartet.config.once import reads_once
from quartet.run.dialect import Translation, Untranslated
from quartet.run.prime_rl import VERSION, Form, sft, sft_form
from quartet.run.sft import SftConfig
from quartet.run.values import Table


class _Options(Config):
    """What options of prime-rl's `sft` may name."""

    data: Table
    deployment: Table
    log: Table
    model: Table
    monitors: Table
    optim: Table
    renderer: Table
    scheduler: Table
    slurm: Table
    tokenizer: Table
    val: Table


def _translate(tables: Mapping[str, Any], asked: Asked) -> Translation:
    return sft.translate(tables, asked.ours)


PRIME_RL = Dialect(
    "prime-rl's sft",
    _Options,
    lambda tables: sft_form.form_of(tables)[0] is Form.THEIRS,
    sft_form.owns,
    frozenset({"max_steps"}),
    _translate,
    lambda tables: f", what it leaves out as in prime-rl {VERSION}",
)


@dataclass(frozen=True)
class SftFile:
    """A fine-tuning, and what else its file says."""

    config: SftConfig
    output_dir: Path | None = None


def load_sft(argv: list[str], flags: Collection[str] = ()) -> SftFile:
    """Parse and validate. `flags` are the command's options that are no keys. Raises ConfigError."""
    read = reads_once()
    arguments = list(items(argv))
    tables = {item.tokens: item.tables(read) for item in arguments if item.file}
    files = [item for item in arguments if PRIME_RL.is_its(tables.get(item.tokens) or {})]
    refused = [error for item in arguments if (error := _mixed(item, tables.get(item.tokens) or {}))]
    if not files:
        return SftFile(load(SftConfig, argv, Draft(read=read, flags=flags, refused=refused)).config)
    theirs, _, laid_over = parted(arguments, PRIME_RL, files)
    said = merged(PRIME_RL.options, theirs, Draft(read=read))
    own = merged(SftConfig, laid_over, Draft(read=read, flags=flags)).values
    refused = [*said.refused, *refused]
    names = ", ".join(one.file for one in files)
    print(
        f"{names}: read as {PRIME_RL.name}{PRIME_RL.remark(said.values)}; 'quartet sft --dry-run' shows the "
        "fine-tuning that it is",
        file=sys.stderr,
    )
    ours = {key.replace("-", "_"): value for key, value in own.items()}
    try:
        run = PRIME_RL.translate(said.values, Asked(True, "embedded", None, ours))
    except Untranslated as error:
        run, refused = error.run, [*refused, error]
    if run.without_effect:
        print(f"without effect here: {'; '.join(run.without_effect)}", file=sys.stderr)
    origins = {**said.origins, **{path: place_of(source, said) for path, source in run.origins.items()}}
    draft = Draft(run.tables, origins, read=read, flags=flags)
    draft.translated, draft.refused, draft.lacks_a_file = dict(origins), refused, bool(refused)
    config = load(SftConfig, laid_over, draft).config
    return SftFile(config, Path(run.output_dir) if run.output_dir else None)


def _mixed(item: Item, tables: Mapping[str, Any]) -> ConfigError | None:
    """What is said of a file that is of prime-rl's form and of Quartet's."""
    form, theirs, ours = sft_form.form_of(tables)
    # One at the top alone is a mistake that its own refusal explains.
    if form is not Form.MIXED or not any("." in key for key in theirs):
        return None
    remedy = "write one of the two in a file and the other in a second one ('@ a.toml @ b.toml')"
    both = f"keys of prime-rl ({', '.join(theirs[:3])}) with Quartet's own ({', '.join(ours[:3])})"
    return ConfigError(f"{item.file} mixes {both}; {remedy}", remedy=remedy)
