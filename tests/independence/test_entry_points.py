"""What a process imports before it knows what it has to do."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("entry", "without"),
    [
        ("quartet.cli.__main__", "matplotlib, tokenizers, sqlite3, torch"),
        ("quartet_trainer.__main__", "torch, transformers, numpy"),
        ("quartet_inference.__main__", "torch, transformers, numpy, fastapi"),
        ("quartet_envhost.__main__", "verifiers, openai, numpy"),
        ("quartet_envhost.worker", "verifiers, openai, numpy"),
        ("quartet_orchestrator.__main__", "torch, numpy"),
        ("quartet_tinker.__main__", "torch, numpy, aiohttp"),
    ],
)
def test_an_entry_point_imports_nothing_large(entry: str, without: str) -> None:
    """So that `--help`, `--dry-run` and preflights are quick, and a service says at once what it refuses."""
    code = f"import sys, {entry}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(without.split(", ")) & set(done.stdout.split()) == set()


#: Somebody presses Ctrl-C while the module is looked for.
PRESSED = """
import os, signal, sys

class Pressed:
    def __set_name__(self, *rest):
        os.kill(os.getpid(), signal.SIGINT)

class Presses:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            if {in_class}:
                type("Made", (), {{"field": Pressed()}})
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Presses())
sys.argv = ["quartet", "runs"]
from quartet.cli.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("in_class", [False, True], ids=["", "while a class is made"])
@pytest.mark.parametrize("module", ["quartet.config", "quartet.kit.proxies", "quartet.cli.clients"])
def test_ctrl_c_while_the_command_is_imported_ends_it_quietly(module: str, in_class: bool) -> None:
    code = PRESSED.format(module=module, in_class=in_class)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
