"""What the tests of commands share: a model that is made in a moment, and an endpoint that is not ours."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUARTET, REPOSITORY
from tests.forked_services import Forks, listening

COMMAND_SECONDS = 300  # a loaded machine takes many times the usual 10 s


def quartet(*arguments: str | Path, cwd: Path = REPOSITORY, **environment: str) -> Any:
    """Run a command to its end."""
    return subprocess.run(
        [*QUARTET, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        env={**os.environ, **environment},
    )


@contextmanager
def service(forks: Forks, name: str, folder: Path, *options: str | Path) -> Iterator[str]:
    """A service by itself, on a port of its own: its address."""
    port_file, log = folder / name, folder / f"{name}.log"
    words = ["--server.address", "127.0.0.1:0", "--server.port_file", str(port_file), *map(str, options)]
    with listening(forks.start(name, words, log), log, port_file):
        yield port_file.read_text().strip()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that was taught nothing."""
    import torch
    import transformers
    from quartet.cli.tiny.files import PHRASES, write_model_files

    folder = tmp_path_factory.mktemp("random") / "model"
    write_model_files(folder, PHRASES)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


#: The one tool that a calling model knows, and what it calls it with.
SHOUT = {
    "name": "shout",
    "description": "Says it loudly.",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "What to say."}},
        "required": ["text"],
    },
}
SHOUTED = {"text": "ab"}


@pytest.fixture(scope="session")
def calling_model(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that was taught, in some 15 s, to call SHOUT with SHOUTED and say the result, or as often to say
    "no" at once."""
    folder = tmp_path_factory.mktemp("calling")
    call = {"role": "assistant", "content": "", "tool_calls": [_call(SHOUTED)]}
    loud = {"role": "tool", "name": SHOUT["name"], "content": "AB"}
    answers = [[{"role": "assistant", "content": "no"}], [call, loud, {"role": "assistant", "content": "AB"}]]
    tools = [{"type": "function", "function": SHOUT}]
    with (folder / "chats.jsonl").open("w") as file:
        for number, answer in itertools.product(range(12), answers):
            asked = {"role": "user", "content": f"say {number}"}
            file.write(json.dumps({"messages": [asked, *answer], "tools": tools}) + "\n")
    done = quartet(
        *("sft", "--model", random_model, "--data", folder / "chats.jsonl", "--output-dir", folder / "sft"),
        *("--max-steps", "90", "--batch-size", "16", "--learning-rate", "4e-3"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "sft" / "checkpoint"


def _call(arguments: dict[str, str]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": SHOUT["name"], "arguments": arguments}}


class Endpoint(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint that reverses texts, and says what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.bodies: list[dict[str, Any]] = []
        # Whether it refuses the text that it was asked first.
        self.picky = False
        # Reverses only where the system prompt says this.
        self.magic = ""
        # What it says to a question without a system prompt.
        self.proposal = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


def _question(body: dict[str, Any]) -> Any:
    return next(one["content"] for one in reversed(body["messages"]) if one["role"] == "user")


class _Answers(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        texts = {one["role"]: one["content"] for one in body["messages"]}
        asked = _question(body)
        if self.server.picky and asked == _question(self.server.bodies[0]):
            self._send(400, {"error": {"message": "that text is refused"}})
            return
        if "system" not in texts:
            said = self.server.proposal
        elif self.server.magic in texts["system"]:
            said = f"<reversed_text>{asked[::-1]}</reversed_text>"
        else:
            said = asked
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        self._send(200, {**answer, "choices": [choice], "usage": usage})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A running endpoint."""
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def only(folder: Path, pattern: str) -> Path:
    """The one path that matches."""
    (found,) = [one for one in folder.glob(pattern) if not re.search(r"/services/", str(one))]
    return found
