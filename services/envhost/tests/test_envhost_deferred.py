"""Packages that are imported once somebody asks for more of them than a class or two."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quartet_envhost.v1.deferred import defer

#: Says when it is executed; takes a name from the package in it, which takes one from here.
ABOVE = """
import sys
sys.executed.append(__name__)
VERSION = "1"
from .types import Message, Usage, NAMES
"""
TYPES = """
import sys
sys.executed.append(__name__)
from .message import Message as Message
from .usage import Usage as Usage
from .. import VERSION
NAMES = ("Message", "Usage", VERSION)
"""


DEFERRED = {"mail": {}, "mail.types": {"Message": "message", "Usage": "usage"}}


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What of the package `mail` was executed so far."""
    for file, text in {
        "__init__.py": ABOVE,
        "types/__init__.py": TYPES,
        "types/usage.py": "class Usage: pass\n",
        "types/message.py": "from .usage import Usage\nclass Message:\n    usage = Usage\n",
    }.items():
        (tmp_path / "mail" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mail" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "executed", made := [], raising=False)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "mail"]:
        del sys.modules[name]


def test_promise_1_a_name_comes_without_the_package_around_it(executed: list[str]) -> None:
    defer(DEFERRED)
    mail_types = importlib.import_module("mail.types")
    assert mail_types.Message.usage is mail_types.Usage is sys.modules["mail.types.usage"].Usage
    assert executed == []


@pytest.mark.parametrize("asked", ["mail", "mail.types"])
def test_promise_2_whatever_else_is_asked_for_imports_it_once(executed: list[str], asked: str) -> None:
    defer(DEFERRED)
    mail, mail_types = importlib.import_module("mail"), importlib.import_module("mail.types")
    message = mail_types.Message
    names = importlib.import_module(asked).NAMES
    assert names == mail.NAMES == mail_types.NAMES == ("Message", "Usage", "1")
    assert sorted(executed) == ["mail", "mail.types"]
    assert mail.Message is mail_types.Message is message
    assert sys.modules["mail"] is mail and sys.modules["mail.types"] is mail_types is mail.types
    with pytest.raises(AttributeError, match=r"module 'mail.types' has no attribute 'Letter'"):
        _ = mail_types.Letter


@pytest.mark.parametrize(
    "text", ["from .. import VERSION\nclass Message: pass\n", "from ..gone import Base\n", "Letter = 1\n"]
)
def test_promise_3_what_cannot_be_imported_alone_is_not_deferred(
    executed: list[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "mail/types/message.py").write_text(text)
    defer(DEFERRED)
    assert not [name for name in sys.modules if name.startswith("mail.") or name == "mail"] or (
        importlib.import_module("mail").Message is sys.modules["mail.types.message"].Message
    )


def test_promise_3_a_package_that_is_not_there_stays_so() -> None:
    defer({"no_such_package": {}, "no_such_package.types": {}})
    assert "no_such_package" not in sys.modules


#: As a worker: the adapter first. Then as an environment that has a use for the package, and as tools.
WORKER = """
import asyncio
import sys
import threading
from quartet_envhost.own_code import OwnCode
from quartet_envhost.v1.environment import HostedEnvironment
from quartet_envhost.v1.harness import HARNESS_ID, InProcessHarness
from quartet_envhost.v1.interception import HostInterception
def of_anthropic():
    return sum(name.partition(".")[0] == "anthropic" for name in sys.modules)
few = of_anthropic()
from verifiers.v1.dialects.anthropic import AnthropicMessage
import anthropic
client = anthropic.AsyncAnthropic(api_key="none")
from anthropic.types import Message, MessageParam
print(few < 300 < 1000 < of_anthropic(), Message is AnthropicMessage, client.messages is not None)
import verifiers.v1 as vf
from verifiers.v1.errors import ToolsetError
from verifiers.v1.utils.loaders import import_taskset
HostedEnvironment("reverse-text", {}, OwnCode("reverse-text"))
own, shipped = import_taskset("reverse-text"), import_taskset("openenv")
print(own.__name__ == "reverse_text", "mcp" not in sys.modules)
class Importers:
    threads = []
    def find_spec(self, name, path=None, target=None):
        if name == "mcp":
            self.threads.append(threading.current_thread())
sys.meta_path.insert(0, Importers())
async def with_tools():
    harness, data = InProcessHarness(vf.HarnessConfig(id=HARNESS_ID)), vf.TaskData(idx=0, prompt="Hello")
    async with HostInterception(state_service_secrets={}) as here:
        await harness.launch(None, None, None, here.base_url, "", {"town": "http://127.0.0.1:9/mcp"}, data)
try:
    asyncio.run(with_tools())
except ToolsetError as error:
    print("town" in str(error), len(Importers.threads) == 1)
    print(threading.main_thread() not in Importers.threads)
from verifiers.v1.tasksets import OpenEnvTaskset
print(OpenEnvTaskset is shipped.OpenEnvTaskset)
"""


def test_a_worker_imports_little_of_them_and_mcp_beside_its_loop(envs_python: str) -> None:
    done = subprocess.run([envs_python, "-c", WORKER], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 9, done.stderr
