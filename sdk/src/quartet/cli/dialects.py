"""The dialects of a command line `@ run.toml --trainer @ t.toml --key value`: Quartet's, vf-rl's, prime-rl's.

1. A file is taken for one of another trainer by its form. What it says goes to its translation, with the
   options that are of its dialect; all else is Quartet's, and wins. An option by a key that both have is of
   both, so that it wins over files of either.
2. Files of two other trainers do not go together: each has its own defaults. A file that is of prime-rl's
   form and of Quartet's is nobody's, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quartet.config import Config, ConfigError
from quartet.config.keys import annotation_at, is_table
from quartet.run import prime_rl, vf_rl
from quartet.run.config import RunConfig
from quartet.run.dialect import Engine, Translation
from quartet.run.values import Table

Tables = dict[str, Any]
Read = Callable[[str], Tables]
Path = tuple[str, ...]


class _VfRlTables(Config):
    """What options of vf-rl may name."""

    env: Table
    inference: Table
    trainer: Table


class _PrimeRlTables(Config):
    """What options of prime-rl may name."""

    ckpt: Table
    deployment: Table
    inference: Table
    log: Table
    model: Table
    monitors: Table
    orchestrator: Table
    slurm: Table
    trainer: Table
    wandb: Table
    weight_broadcast: Table


@dataclass(frozen=True)
class Asked:
    """What a translation has to know beside the file."""

    starts_services: bool
    engine: Engine
    wandb_project: str | None
    #: What is said in Quartet's own words.
    ours: Mapping[str, Any]
    #: Whether this machine has a GPU for each of trainer and engine.
    has_two_gpus: bool = False


@dataclass(frozen=True)
class Dialect:
    """Files of another trainer."""

    name: str
    #: What options may name.
    options: type[Config]
    #: Whether tables are of its form.
    is_its: Callable[[Mapping[str, Any]], bool]
    #: The place of an option's key in its file; None where it is Quartet's.
    owns: Callable[[Path], Path | None]
    #: Options that say the same in Quartet's own words.
    shared: frozenset[str]
    translate: Callable[[Mapping[str, Any], Asked], Translation]
    #: What is said beside the name of its files: whose defaults they get.
    remark: Callable[[Mapping[str, Any]], str]
    #: The place of an option without a value, and what it says there; None where it needs one.
    without_value: Callable[[Path], tuple[Path, str] | None] = lambda path: None


def _of_vf_rl(tables: Mapping[str, Any], asked: Asked) -> Translation:
    # Where no service is started nobody knows what there is, and nothing of it is read.
    engine: Engine = asked.engine if asked.starts_services else "vllm"
    return vf_rl.translate(
        tables,
        engine,
        has_two_gpus=asked.has_two_gpus,
        wandb_project=asked.wandb_project,
        own=asked.ours,
    )


def _of_prime_rl(tables: Mapping[str, Any], asked: Asked) -> Translation:
    return prime_rl.translate(
        tables,
        asked.engine,
        starts_services=asked.starts_services,
        has_two_gpus=asked.has_two_gpus,
        own=asked.ours,
    )


def _defaults_of_prime_rl(tables: Mapping[str, Any]) -> str:
    said = f", what it leaves out as in prime-rl {prime_rl.VERSION}"
    if later := prime_rl.counts_on_later(tables):
        said += f" ({', '.join(later)} came later, with another default loss: write [trainer.loss] for it)"
    return said


def _is_prime_rl(tables: Mapping[str, Any]) -> bool:
    return prime_rl.form_of(tables)[0] is prime_rl.Form.THEIRS


VF_RL = Dialect(
    "vf-rl",
    _VfRlTables,
    vf_rl.is_vf_rl,
    vf_rl.owns,
    vf_rl.SHARED,
    _of_vf_rl,
    lambda tables: "",
)
PRIME_RL = Dialect(
    "prime-rl",
    _PrimeRlTables,
    _is_prime_rl,
    prime_rl.owns,
    frozenset({"max_steps"}),
    _of_prime_rl,
    _defaults_of_prime_rl,
    prime_rl.without_value,
)
DIALECTS = (VF_RL, PRIME_RL)


@dataclass(frozen=True)
class Item:
    """An argument: a file, with the table whose it is, or an option."""

    tokens: tuple[str, ...]
    file: str = ""
    #: Of an option, or of a file after the name of a table.
    key: Path = ()

    def tables(self, read: Read) -> Tables | None:
        """Of the file, in the place where they stand; None where it cannot be read, which `load` refuses."""
        try:
            tables = read(self.file)
        except ConfigError:
            return None
        for part in reversed(self.key):
            tables = {part: tables}
        return tables


def items(argv: list[str]) -> Iterator[Item]:
    """The arguments, one after the other; joined they are argv again, but for the spelling of '@'."""
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token.startswith("@"):
            path = token[1:] or (rest.pop(0) if rest else "")
            yield Item(("@", path) if path else ("@",), path)
            continue
        name, equals, _ = token.removeprefix("--").partition("=")
        key = tuple(name.replace("-", "_").split(".")) if token.startswith("--") else ()
        if (
            key
            and not equals
            and rest
            and rest[0].startswith("@")
            and is_table(annotation_at(RunConfig, key))
        ):
            path = rest.pop(0)[1:] or (rest.pop(0) if rest else "")
            yield Item((token, "@", path), path, key)
        elif key and not equals and rest and not rest[0].startswith(("--", "@")):
            yield Item((token, rest.pop(0)), "", key)
        else:
            yield Item((token,), "", key)


def dialect_of(said: list[Item], read: Read) -> tuple[Dialect | None, list[Item]]:
    """The dialect of the files that are not Quartet's, and these. Raises ConfigError where there are two."""
    found: dict[str, list[Item]] = {}
    for item in said:
        if item.file and (tables := item.tables(read)) is not None:
            its = next((one for one in DIALECTS if one.is_its(tables)), None)
            if its is not None:
                found.setdefault(its.name, []).append(item)
    if len(found) > 1:
        each = "; ".join(f"{', '.join(one.file for one in of)} of {name}" for name, of in found.items())
        raise ConfigError(f"files of two other trainers do not go together: {each}; leave one out")
    if not found:
        return None, []
    (name,) = found
    return next(one for one in DIALECTS if one.name == name), found[name]


def mixed(said: list[Item], read: Read) -> list[tuple[Item, ConfigError]]:
    """The files that are of prime-rl's form and of Quartet's, with a sentence for each: read as either, the
    keys of the other would be wrong, too."""
    refused = []
    for item in said:
        tables = item.tables(read) if item.file else None
        if tables is None or VF_RL.is_its(tables):
            continue
        form, theirs, ours = prime_rl.form_of(tables)
        # One at the top alone is a mistake that its own refusal explains.
        if form is prime_rl.Form.MIXED and any("." in key for key in theirs):
            remedy = (
                "write one of the two in a file and the other in a second one ('@ a.toml @ b.toml'), and "
                "give the file of one service after its name ('--orchestrator @ FILE')"
            )
            both = f"keys of prime-rl ({_some(theirs)}) with Quartet's own ({_some(ours)})"
            refused.append((item, ConfigError(f"{item.file} mixes {both}; {remedy}", remedy=remedy)))
    return refused


def parted(
    said: list[Item], dialect: Dialect, its_files: list[Item]
) -> tuple[list[str], list[str], list[str]]:
    """The arguments of the dialect, those of Quartet, and the latter with options that are of both."""
    theirs: list[str] = []
    ours: list[str] = []
    laid_over: list[str] = []
    for item in said:
        if item.file or not item.key:
            for those in (theirs,) if item in its_files else (ours, laid_over):
                those.extend(item.tokens)
            continue
        _, equals, value = item.tokens[0].partition("=")
        has_value = bool(equals) or len(item.tokens) > 1
        if not has_value and (flag := dialect.without_value(item.key)) is not None:
            theirs.append(f"--{'.'.join(flag[0])}={flag[1]}")
            continue
        place = dialect.owns(item.key)
        if place is None or not has_value:  # refused as it was written
            ours.extend(item.tokens)
            laid_over.extend(item.tokens)
        else:
            theirs.append(f"--{'.'.join(place)}{equals}{value}")
            theirs.extend(item.tokens[1:])
            if ".".join(item.key) in dialect.shared:
                laid_over.extend(item.tokens)
    return theirs, ours, laid_over


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
