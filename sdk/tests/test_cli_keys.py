"""`quartet keys`, and the help of the services: every key, and what its source says of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from quartet.cli.__main__ import main
from quartet.config import Config
from quartet.config.described import described
from quartet.config.keys import known_keys
from quartet.config.load import usage
from quartet.run.config import RunConfig
from quartet.run.evaluation import EvaluateConfig
from quartet.run.sft import SftConfig


class Base(Config):
    #: Of the base,
    #: in two lines.
    first: int = 1
    #: Of nothing: a line is between.

    second: bool = False


class Table(Config):
    name: str
    #: One of them.
    kind: Literal["a", "b"] | None = None
    words: tuple[str, ...] = ("x", "y")


class Whole(Base):
    folder: Path = Path("here")
    """Not of a comment."""
    limit: float | None = None
    #: Read through it.
    table: Table
    rows: tuple[Table, ...] = ()
    free: dict[str, int] = {}  # noqa: RUF012


LINES = [
    "  first = 1",
    "        Of the base, in two lines.",
    "  second = false",
    '  folder = "here"',
    "  limit    (number)",
    "  table.name    (text)",
    '  table.kind    ("a" | "b")',
    "        One of them.",
    '  table.words = ["x", "y"]',
    "  rows.name    (text)",
    '  rows.kind    ("a" | "b")',
    "        One of them.",
    '  rows.words = ["x", "y"]',
    "  free = {}",
]


def test_each_key_has_its_default_and_its_comment() -> None:
    """described.py 1."""
    assert described(Whole) == LINES
    assert described(Whole, "table") == LINES[5:9]
    assert described(Whole, "table.kind") == LINES[6:8]
    assert described(Whole, "tab") == []
    assert usage(Whole).splitlines()[2:5] == ["  --first = 1", LINES[1], "  --second = false"]


def test_a_source_that_cannot_be_read_has_no_comments() -> None:
    """described.py 2."""
    namespace: dict[str, object] = {"Config": Config, "__name__": "typed_in"}
    exec("class Typed(Config):\n    #: Said.\n    key: int = 2\n", namespace)
    assert described(namespace["Typed"]) == ["  key = 2"]  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [RunConfig, SftConfig, EvaluateConfig])
def test_every_key_of_a_file_has_a_text(model: type[Config]) -> None:
    for key in known_keys(model):
        assert len(described(model, key)) > 1, f"no comment stands above {key}"


@pytest.mark.parametrize(("options", "model"), [([], RunConfig), (["--of", "sft"], SftConfig)])
def test_all_keys_are_listed(
    options: list[str], model: type[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if not line.startswith("    ")]
    assert listed == list(known_keys(model)) and max(map(len, lines)) < 200


def test_tables_and_keys_are_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "[sampling]", "max-steps"]) == 0
    out = capsys.readouterr().out
    assert (
        "sampling.temperature = 1.0\n" in out
        and "  max_steps = 100\n        Steps, each of one batch.\n" in out
    )
    assert main(["keys", "inference"]) == 0
    assert "python -m quartet_inference --help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("samplin", "did you mean 'sampling'?"),
        ("sampling.max_token", "did you mean 'sampling.max_tokens'?"),
        ("keep_interval", "did you mean 'ckpt.keep_interval'?"),
        ("algorithm.kernal", "did you mean 'algorithm.kernel'?"),
        ("sft", "write --of sft"),
        ("lr", "it is called 'learning_rate' here"),
        ("xyzzy", "'quartet keys' lists all"),
    ],
)
def test_a_name_that_is_none_is_told_with_what_was_meant(
    asked: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", asked]) == 2
    assert f"there is no table and no key {asked!r} here; {meant}" in capsys.readouterr().err


def test_a_list_that_cannot_be_written_is_no_success() -> None:
    command = [sys.executable, "-m", "quartet.cli", "keys", "sampling"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == "error: No space left on device\n"
