"""Reads a configuration from an argument list: `@ a.toml --table @ b.toml --a.b value --flag --no-other
--dry-run`, with `--preflight` in place of `--dry-run` where the machine is to be looked at too.

1. Files and overrides are merged left to right, tables key by key, everything else (lists too) replaced
   whole. Of the files before it is dropped what does not go with an option or a file (`Config.outdone`).
2. An override's value is TOML (`3`, `true`, `["a"]`), or plain text where it is none or where the key takes
   text.
3. `max-steps` and `max_steps` are the same key.
4. A file after the name of a table is what stands in that table: one file for each service.
5. Whatever is wrong becomes a sentence of one ConfigError: where, key, value, what would be right. An
   argument that is refused does not hide what is wrong with the others.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic

from quartet.config.described import described
from quartet.config.explain import Source, explain, near_flag, near_key
from quartet.config.keys import accepts_text, annotation_at, is_array, is_flag, is_table, model_at
from quartet.config.model import Config, ConfigError
from quartet.config.refusals import together
from quartet.config.text import read_text

C = TypeVar("C", bound=Config)

#: What options of one letter are, of other tools and of other commands here, where there are none.
_WHOLE_NAMES: Mapping[str, str] = {"-o": "--output-dir", "-m": "--model", "-c": "@", "-f": "@"}


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """What an argument list asked for."""

    config: C
    dry_run: bool = False
    preflight: bool = False


@dataclass
class Draft:
    """The merged tables so far, and which argument each key came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    dry_run: bool = False
    preflight: bool = False
    #: How a file is read.
    read: Callable[[str], dict[str, Any]] = field(default_factory=lambda: read_toml)
    #: Options of the command that are no keys, such as "--resume"; they are gone from the arguments.
    flags: Collection[str] = ()
    #: Of the keys that a file of another trainer became, where it says them.
    translated: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    #: What was refused of the arguments so far; of a file, nothing was read.
    refused: list[ConfigError] = field(default_factory=list)
    lacks_a_file: bool = False
    #: What else is wrong with values that are refused: with tables that the model carries and does not read.
    of_carried: Callable[[dict[str, Any]], Iterable[ConfigError]] = lambda values: []


def load(model: type[C], argv: list[str], start: Draft | None = None) -> Loaded[C]:
    """Parse and validate an argument list, laid over `start`. Raises ConfigError."""
    draft = merged(model, argv, start)
    source = Source(draft.origins, draft.translated, draft.flags, bool(draft.refused), draft.lacks_a_file)
    try:
        config = _validated(model, draft.values, source, draft.refused)
    except ConfigError as error:
        raise together([error, *draft.of_carried(draft.values)]) from None
    return Loaded(config, dry_run=draft.dry_run, preflight=draft.preflight)


def merged(model: type[Config], argv: list[str], start: Draft | None = None) -> Draft:
    """The tables that an argument list amounts to, laid over `start`, and what was refused of it."""
    draft = start or Draft()
    rest = list(argv)
    while rest:
        try:
            _take(draft, model, rest)
        except ConfigError as error:
            draft.refused.append(error)
    return draft


def validate(model: type[C], values: dict[str, Any]) -> C:
    """Validate tables that are already merged. Raises ConfigError."""
    return _validated(model, values, Source(), [])


def _validated(model: type[C], values: dict[str, Any], source: Source, refused: list[ConfigError]) -> C:
    try:
        config = model.model_validate(values)
    except pydantic.ValidationError as error:
        raise together([*refused, *explain(model, error, source)]) from None
    except OSError as error:  # of a file or folder that a model looks at
        why = f"{error.filename or 'what it names'} cannot be looked at: {error.strerror or error}; name "
        why += "one that this user can read"
        raise together([*refused, ConfigError(why)]) from None
    if refused:
        raise together(refused)
    return config


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read one TOML file. Raises ConfigError with the path, and the line where the file is malformed."""
    what = f"config file {str(path)!r}"
    try:
        text = read_text(Path(path), what)
    except ConfigError as error:
        match error.__cause__:
            case FileNotFoundError():
                raise ConfigError(f"{what} does not exist; check the path after '@'") from None
            case IsADirectoryError():
                raise ConfigError(f"{what} is a directory; name a TOML file in it") from None
        raise
    return parse_toml(text, what)


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Read TOML. Raises ConfigError that begins with what it is."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # malformed, or a number of thousands of digits
        raise ConfigError(f"{what} is not valid TOML: {error}{_of_a_word(text, str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply to be a configuration") from None


def _of_a_word(text: str, said: str) -> str:
    """What to write in the place of a word that is no value, such as a text without quotes."""
    at = re.search(r"^Invalid value \(at line (\d+),", said)
    line = text.splitlines()[int(at[1]) - 1] if at else ""
    if (found := re.fullmatch(r"\s*([\w.-]+)\s*=\s*([A-Za-z./~][^\"'#\[\]{}]*?)\s*(#.*)?", line)) is None:
        return ""
    key, value = found[1], found[2]
    if value.lower() in ("true", "false"):
        return f"; write {key} = {value.lower()}"
    if value.lower() in ("none", "null"):
        return f"; TOML has no such value, leave {key} out"
    return f'; a text needs quotes: {key} = "{value}"'


def usage(model: type[Config]) -> str:
    """Every key with its default, for `--help`."""
    line = "usage: [@ file.toml ...] [--key value ...] [--dry-run | --preflight]\n"
    return "\n".join([line, *described(model, option="--")])


def _take(draft: Draft, model: type[Config], rest: list[str]) -> None:
    """The first argument, with its value. Raises ConfigError."""
    token = rest.pop(0)
    if token.startswith("@"):
        path = token[1:] or _path_after(draft, rest)
        _lay(draft, model, (), _read(draft, path), path)
    elif token == "--dry-run":
        draft.dry_run = True
    elif token == "--preflight":
        draft.preflight = True
    elif token.startswith("--") and len(token) > 2:
        _merge_option(draft, model, token, rest)
    elif re.fullmatch("-[A-Za-z]", token):
        value = rest.pop(0) if rest and not rest[0].startswith(("-", "@")) else ""
        name = _WHOLE_NAMES.get(token, "")
        is_here = name in ("@", *draft.flags) or name.removeprefix("--") in model.model_fields
        meant = f"{name} {value or 'VALUE'}" if is_here else "--key value"
        raise ConfigError(f"there is no option {token!r} here; write '{meant}'")
    elif "=" in token and model.is_others(token.partition("=")[0]):  # Hydra's way to say it
        _merge_option(draft, model, f"--{token}", rest)  # what it is called here is told with the others
    else:
        meant = f"'--{token}'" if re.match(r"[\w.]+=", token) else "'@ file.toml' or '--key value'"
        meant = f"'@ {token}'" if token.endswith(".toml") else meant
        raise ConfigError(f"argument {token!r} is not understood; write {meant}")


def _read(draft: Draft, path: str) -> dict[str, Any]:
    try:
        return draft.read(path)
    except ConfigError:
        draft.lacks_a_file = True
        raise


def _merge(
    draft: Draft, into: dict[str, Any], table: dict[str, Any], prefix: tuple[str, ...], origin: str
) -> None:
    for key, value in table.items():
        if (other := key.replace("-", "_")) != key and other in table:
            draft.refused.append(ConfigError(f"{key!r} and {other!r} are one key in {origin}; remove one"))
        name = _existing(into, key)
        path = (*prefix, name)
        is_table = isinstance(value, dict)
        if not (is_table and isinstance(into.get(name), dict)):
            into[name] = {} if is_table else value
            draft.origins[_snake(path)] = origin
        if is_table:
            _merge(draft, into[name], value, path, origin)


def _snake(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.replace("-", "_") for part in path)


def _existing(table: dict[str, Any], key: str) -> str:
    """The spelling under which a table already has this key, so that `a-b` overrides `a_b`."""
    return next((name for name in table if name.replace("-", "_") == key.replace("-", "_")), key)


def _merge_option(draft: Draft, model: type[Config], token: str, rest: list[str]) -> None:
    name, equals, inline = token[2:].partition("=")
    path = _snake(tuple(name.split(".")))
    if not all(path):
        raise ConfigError(f"option {token!r} has an empty key; write '--table.key value'")
    value: Any
    if not equals and rest and rest[0].startswith("@") and is_table(annotation_at(model, path)):
        file = rest.pop(0)[1:] or _path_after(draft, rest)
        _lay(draft, model, path, _read(draft, file), file)
        return
    if equals:
        value = _parse(model, path, inline)
    elif (negated := _negated(model, path)) is not None:
        path, value = negated, False
    elif is_flag(annotation_at(model, path)) and (not rest or rest[0] not in ("true", "false")):
        if rest and not _is_argument(rest[0]):
            raise ConfigError(f"--{name} {rest.pop(0)} is refused: write '--{name}', or '--{name} false'")
        value = True
    elif rest and not _is_argument(rest[0]):
        value = _parse(model, path, rest.pop(0))
    elif is_table(annotation_at(model, path)) and (table := model_at(model, path)) is not None:
        raise ConfigError(f"'--{name}' is a table; write '--{name}.KEY', of {', '.join(table.model_fields)}")
    elif issubclass(model, Config) and ".".join(path) in model.OTHER_NAMES:
        value = True  # others' flag, which is refused by its name
    else:
        unknown = path[0] not in model.model_fields
        meant = (near_flag(model, name, draft.flags) or near_key(model, path)) if unknown else ""
        remedy = meant or f"write '--{name} VALUE' or '--{name}=VALUE'"
        raise ConfigError(f"option '--{name}' has no value; {remedy}")
    _lay(draft, model, path, value, f"--{name}")


def _lay(draft: Draft, model: type[Config], path: tuple[str, ...], value: Any, origin: str) -> None:
    """What an argument says, over what those before it said, without what of files does not go with it."""
    for outdone in model.all_outdone(path, value, draft.values, by_option=origin.startswith("--")):
        _drop(draft, tuple(outdone.split(".")))
    if path:
        _assign(draft, model, path, value, origin)
    else:
        _merge(draft, draft.values, value, path, origin)


def _drop(draft: Draft, path: tuple[str, ...]) -> None:
    """Unsay what files say by a key; what options say of it stays."""
    origins = {at: origin for at, origin in draft.origins.items() if at[: len(path)] == path}
    table: Any = draft.values
    for part in path[:-1]:
        table = table.get(_existing(table, part), {}) if isinstance(table, dict) else None
    if not isinstance(table, dict) or any(origin.startswith("--") for origin in origins.values()):
        return
    table.pop(_existing(table, path[-1]), None)
    for at in origins:
        del draft.origins[at]


def _path_after(draft: Draft, rest: list[str]) -> str:
    if not rest or not rest[0]:
        draft.lacks_a_file = True
        del rest[:1]
        raise ConfigError("'@' is followed by nothing; write the path of a TOML file after it")
    return rest.pop(0)


def _is_argument(token: str) -> bool:
    return token.startswith(("--", "@"))


def _negated(model: type[Config], path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The boolean that `--no-a.b` or `--a.no-b` switches off; a key of exactly that name wins."""
    if annotation_at(model, path) is not None:
        return None
    candidates = [(path[0].removeprefix("no_"), *path[1:]), (*path[:-1], path[-1].removeprefix("no_"))]
    for candidate in candidates:
        if candidate != path and is_flag(annotation_at(model, candidate)):
            return candidate
    return None


def _parse(model: type[Config], path: tuple[str, ...], text: str) -> Any:
    quoted = text[:1] in ("'", '"')
    if accepts_text(annotation_at(model, path)) and not quoted:
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return _json(text)
    return document["value"] if len(document) == 1 else text


def _json(text: str) -> Any:
    """A table or a list, as many would type it; the text where it is none."""
    try:
        return json.loads(text) if text[:1] in ("{", "[") else text
    except (ValueError, RecursionError):
        return text


def _assign(draft: Draft, model: type[Config], path: tuple[str, ...], value: Any, origin: str) -> None:
    node: Any = draft.values
    for depth, part in enumerate(path[:-1]):
        if isinstance(node, list):
            node = node[_index(node, part, origin)]
        elif (
            path[depth + 1].isdecimal()
            and part not in node
            and is_array(annotation_at(model, path[: depth + 1]))
        ):
            outer = ".".join(path[: depth + 1])
            raise ConfigError(
                f"{origin} cannot be set: no file before it has a list {outer}; write [[{outer}]] in a file, "
                f"or --{outer} '[{{...}}]'"
            )
        else:
            node = node.setdefault(_existing(node, part), {})
        if not isinstance(node, (dict, list)):
            outer = ".".join(path[: depth + 1])
            raise ConfigError(
                f"{origin} cannot be set: {outer} is {node!r}, not a table; write '--{outer} VALUE'"
            )
    if isinstance(node, list):
        node[_index(node, path[-1], origin)] = value
        return
    _merge(draft, node, {path[-1]: value}, path[:-1], origin)


def _index(node: list[Any], part: str, origin: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        # A list is made by a file; options only change what is in it.
        part = next((typed for typed in origin.split(".") if typed.replace("-", "_") == part), part)
        is_key = not part.removeprefix("-").isdecimal()
        first = origin.replace(f".{part}", f".0.{part}" if is_key else ".0", 1)
        meant = f"; for the first write {first}" if node and origin.startswith("--") else ""
        if meant and part.isdecimal():
            meant += f", and for one more [[{origin[2:].partition(f'.{part}')[0]}]] in a file"
        raise ConfigError(f"{origin} cannot be set: {part!r} is not an index of a list of {len(node)}{meant}")
    return int(part)
