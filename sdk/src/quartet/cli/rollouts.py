"""`quartet rollouts FOLDER`: conversations of a run, from the rollouts/*.jsonl of its output folder.

1. It asks no service and changes nothing. A line that is just being written is left out.
2. Shown is what has its conversation (`messages_of_members` of each group), or the numbers alone where
   nothing has, and of what --group names all. What there is besides is said on stderr.
3. Of a step that is under way nothing is known of what is trained on: the newest is the newest that was
   applied, where there is one.
4. --json has the lines as they are written. Else what a model said is no command for a terminal, and what is
   cut is marked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from quartet.cli.points import Lines
from quartet.config import ConfigError
from quartet.counted import counted
from quartet.kit.standard_streams import shown

DESCRIPTION = """\
Show conversations of a run: for each rollout a line of numbers, then its messages.

  quartet rollouts outputs/first                              of its newest step
  quartet rollouts outputs/first --step 20 --sort advantage -n 3
  quartet rollouts outputs/first --eval --env gsm8k --full    of its newest evaluation, uncut
  quartet rollouts first --json | jq .messages                outputs/first, as lines of JSON
"""
#: Where runs are that are named without a folder.
OUTPUTS: Final = Path("outputs")
#: Rollouts, unless more are asked for.
MAX_SHOWN: Final = 5
#: Letters of one text, unless all are asked for: some 20 lines of a terminal.
MAX_TEXT: Final = 2_000
#: So many of the newest steps are looked through for one that was applied: more than a run is ahead by.
MAX_AHEAD: Final = 128
#: Steps that there are, told to whoever asked for another: so many that are near.
MAX_NEAR: Final = 6
#: By what they are sorted, highest first.
SORTS: Final[Mapping[str, str]] = {
    "reward": "reward",
    "length": "completion_tokens",
    "advantage": "advantage",
}
#: Numbers of a rollout in one line: what it is called here, its key, its format.
NUMBERS: Final = (
    ("env", "env", ""),
    ("task", "task", ""),
    ("group", "group", ""),
    ("member", "member", ""),
    ("reward", "reward", ".3f"),
    ("advantage", "advantage", "+.3f"),
    ("tokens", "completion_tokens", ""),
    ("turns", "turns", ""),
    ("ended by", "stop_condition", ""),
)
BOLD, DIM, PLAIN = "\033[1m", "\033[2m", "\033[0m"

Row = dict[str, Any]
#: Makes a text bold or dim, where there is a terminal for it.
Style = Callable[[str, str], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument(
        "folder", metavar="FOLDER|RUN", type=Path, help="output folder, or its name in outputs/"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of this step (default: the newest)")
    parser.add_argument(
        "--eval", action="store_true", help="of an evaluation: the newest, or that after --step"
    )
    parser.add_argument("--env", metavar="ID", help="of this environment alone")
    parser.add_argument(
        "--group", metavar="N", type=int, help="of this group alone: the rollouts of one task"
    )
    parser.add_argument(
        "--sort", choices=sorted(SORTS), help="highest first (default: in the order in which they ended)"
    )
    parser.add_argument("--lowest", action="store_true", help="with --sort: lowest first")
    parser.add_argument(
        "-n", type=int, metavar="COUNT", help=f"so many (default: {MAX_SHOWN}, and all of a --group)"
    )
    parser.add_argument("--full", action="store_true", help="uncut")
    parser.add_argument("--json", action="store_true", help="lines of JSON, as they are in the folder")


def run(options: argparse.Namespace) -> int:
    """The command. Errors: ConfigError."""
    if options.n is not None and options.n < 1:
        raise ConfigError(f"-n {options.n} is refused; give a number from 1 on")
    if options.lowest and not options.sort:
        raise ConfigError(f"--lowest goes with --sort; add that, of {', '.join(sorted(SORTS))}")
    number, rows = _read(_folder(options.folder), "eval" if options.eval else "step", options.step)
    found = _of_group(_of(rows, options.env), options.group)
    whole = [row for row in found if row.get("messages")]
    those = (whole or found) if options.group is None else found
    most = options.n or (MAX_SHOWN if options.group is None else len(found))
    chosen = _sorted(those, options.sort, lowest=options.lowest)[:most]
    if options.json:
        for row in chosen:
            print(json.dumps(row))
        return 0
    style = _styled if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else _unstyled
    for row in chosen:
        print("\n".join(_lines(row, style, MAX_TEXT if not options.full else None)))
    where = f"of the evaluation after {counted(number, 'step')}" if options.eval else f"of step {number}"
    print(
        f"{len(chosen)} shown {where}, which has {counted(len(found), 'rollout')}, {len(whole)} of them with "
        "their conversation (messages_of_members)",
        file=sys.stderr,
    )
    return 0


def _folder(named: Path) -> Path:
    """That of the rollouts. Raises ConfigError."""
    for folder in (named, OUTPUTS / named):
        if (folder / "rollouts").is_dir():
            return folder / "rollouts"
    raise ConfigError(
        f"{named} has no rollouts/, nor is there {OUTPUTS / named}/rollouts; name the output folder of a "
        "quartet rl, or of a quartet watch --output-dir"
    )


def _read(folder: Path, kind: str, step: int | None) -> tuple[int, list[Row]]:
    """The rollouts of a step, or of an evaluation after it, and which it is. Raises ConfigError."""
    files = [(one.stem.removeprefix(f"{kind}_"), one) for one in folder.glob(f"{kind}_*.jsonl")]
    there = {int(number): file for number, file in files if number.isdecimal()}
    what = "evaluation" if kind == "eval" else "step"
    if not there:
        raise ConfigError(f"{folder} has no rollouts of {'an' if kind == 'eval' else 'a'} {what} yet")
    if step is not None:
        if step not in there:
            near = sorted(there, key=lambda number: abs(number - step))[:MAX_NEAR]
            known = ", ".join(map(str, sorted(near)))
            known = known if len(near) == len(there) else f"{known}, ... (from {min(there)} to {max(there)})"
            raise ConfigError(f"--step {step} is refused: {folder} has {what}s of {known}; name one of them")
        return step, list(Lines(there[step]).new())
    newest, rows = max(there), list[Row]()
    for number in sorted(there, reverse=True)[:MAX_AHEAD]:
        found = list(Lines(there[number]).new())
        newest, rows = (newest, rows) if rows else (number, found)
        # What failed is known before the step is applied.
        if kind == "eval" or any(row.get("trained") is not None and not row.get("failure") for row in found):
            return number, found
    return newest, rows  # of a run that has applied none, or of a release that did not tell


def _of(rows: list[Row], env: str | None) -> list[Row]:
    if env is None:
        return rows
    if not (found := [row for row in rows if row["env"] == env]):
        known = ", ".join(sorted({str(row["env"]) for row in rows}))
        raise ConfigError(f"--env {env} is refused: it has no rollouts there, which are of {known}")
    return found


def _of_group(rows: list[Row], group: int | None) -> list[Row]:
    if group is None:
        return rows
    if not (found := [row for row in rows if row["group"] == group]):
        there = sorted({row["group"] for row in rows}, key=lambda number: abs(number - group))
        near = ", ".join(map(str, sorted(there[:MAX_NEAR])))
        more = ", ..." if len(there) > MAX_NEAR else ""
        raise ConfigError(f"--group {group} is refused: there are groups {near}{more}; name one of them")
    return found


def _sorted(rows: list[Row], by: str | None, *, lowest: bool) -> list[Row]:
    """What lacks the number (a failure has no reward) comes last."""
    if by is None:
        return rows
    key = SORTS[by]
    known = [row for row in rows if row.get(key) is not None]
    return sorted(known, key=lambda row: float(row[key]), reverse=not lowest) + [
        row for row in rows if row.get(key) is None
    ]


def _lines(row: Row, style: Style, most: int | None) -> Iterator[str]:
    """A rollout for a person."""
    yield style(BOLD, shown(_numbers(row)))
    for message in row.get("messages", ()):
        yield from _message(message, style, most)
    if failure := row.get("failure"):
        yield f"{style(BOLD, 'failed')}: {_text(str(failure['message']), most)}"
    if row.get("answer") is not None:
        yield f"{style(BOLD, 'answer of the task')}: {_text(str(row['answer']), most)}"
    yield ""


def _numbers(row: Row) -> str:
    said = [
        f"{name} {format(row[key], form)}" for name, key, form in NUMBERS if row.get(key) not in (None, "")
    ]
    if row.get("truncated"):
        said.append("cut by a limit")
    if row.get("discarded"):
        said.append(f"not trained on: {row['discarded']}")
    return f"== {'  '.join(said)}"


def _message(message: Row, style: Style, most: int | None) -> Iterator[str]:
    name = f" {message['name']}" if message.get("name") else ""
    head = style(BOLD, shown(f"{message['role']}{name}"))
    if thought := message.get("reasoning_content"):
        yield f"{head} (thinks): {style(DIM, _text(thought, most))}"
    if message["content"] or not (thought or message.get("tool_calls")):
        yield f"{head}: {_text(message['content'], most)}"
    for call in message.get("tool_calls", ()):
        yield f"{head} calls: {_text(_call(call), most)}"


def _call(call: str) -> str:
    """As `search({"query": "abc"})`."""
    told = json.loads(call)
    return f"{told['name']}({told['arguments']})"


def _text(text: str, most: int | None) -> str:
    rest = 0 if most is None else len(text) - most
    return shown(text if rest <= 0 else f"{text[:most]}… ({rest} more letters: --full)")


def _styled(code: str, text: str) -> str:
    return f"{code}{text}{PLAIN}"


def _unstyled(code: str, text: str) -> str:
    return text
