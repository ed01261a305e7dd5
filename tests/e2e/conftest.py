"""What the tests of commands share: a model that is made in a moment, and an endpoint that is not ours."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from quartet.local.fork_client import possible
from quartet.local.tether import tethered

from tests.conftest import QUARTET, REPOSITORY

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
def service(name: str, folder: Path, *options: str | Path) -> Iterator[str]:
    """A service by itself, on a port of its own: its address."""
    port_file = folder / name
    command = [sys.executable, "-m", f"quartet_{name}", "--server.address", "127.0.0.1:0"]
    command += ["--server.port_file", str(port_file), *map(str, options)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
        try:
            deadline = time.monotonic() + COMMAND_SECONDS
            while not port_file.exists():
                assert process.poll() is None and time.monotonic() < deadline, f"{name} did not start"
                time.sleep(0.05)
            yield port_file.read_text().strip()
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


IMPORTED = Path(__file__).parent / "imported"


@pytest.fixture(scope="session")
def importer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a process that has made the imports of trainer and inference (imported/once.py); empty where
    launchers use no fork server."""
    if not possible():
        yield ""
        return
    address = str(tmp_path_factory.mktemp("imported") / "socket")
    modules = ["quartet_trainer.preload", "quartet_inference.preload"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        command = [sys.executable, str(IMPORTED / "once.py"), str(listener.fileno()), *modules]
        process = subprocess.Popen(tethered(command), pass_fds=[listener.fileno()])
    yield address
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def imported_once(importer: str) -> Iterator[None]:
    """For a file whose launches take the imports from `importer`, where they cost more than what is tested.
    All else is started as by anybody; launches of other files import what they need themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(IMPORTED), prepend=os.pathsep)
        patch.setenv("QUARTET_TESTS_IMPORTED", importer)
        yield


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
