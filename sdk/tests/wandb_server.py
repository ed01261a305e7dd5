"""As much of a Weights & Biases server as the library needs to log metrics: runs that can be resumed, and the
stream of their files."""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OPERATION = re.compile(r"(?:query|mutation)\s+(\w+)")


class Server(ThreadingHTTPServer):
    """Keeps what it is sent. `away`: it answers 503; `hanging`: it does not answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.away = self.hanging = False
        #: Somebody asks it for something.
        self.asked = threading.Event()
        #: Lines of each run's history, as they were sent.
        self.histories: dict[str, list[str]] = {}
        self.summaries: dict[str, str] = {}
        self.offset_errors: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One that was killed meanwhile reads no answer: nothing that another test should find on stderr."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def steps(self, run: str) -> list[int]:
        """The library's step of each line."""
        return [int(json.loads(line)["_step"]) for line in self.histories[run]]

    def summary(self, run: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.summaries[run])
        return loaded

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """To a GraphQL request."""
        entity = {"id": "E", "name": "me"}
        match operation:
            case "Viewer":
                viewer = {"id": "V", "entity": "me", "username": "me", "email": "", "flags": "{}"}
                return {"viewer": viewer | {"teams": {"edges": []}}}
            case "RunResumeStatus":
                project = {"id": "P", "name": variables["project"], "entity": entity}
                return {"model": project | {"bucket": self._bucket(variables["name"])}}
            case "UpsertBucket":
                name = variables["name"]
                lines = self.histories.setdefault(name, [])
                bucket = {"id": "B", "name": name, "displayName": variables["displayName"] or name}
                bucket |= {
                    "description": "",
                    "config": "{}",
                    "sweepName": None,
                    "historyLineCount": len(lines),
                }
                bucket["project"] = {"id": "P", "name": variables["project"], "entity": entity}
                return {"upsertBucket": {"bucket": bucket, "inserted": not lines}}
            case "CreateRunFiles":
                return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": []}}
        return {}

    def _bucket(self, name: str) -> dict[str, Any] | None:
        if name not in self.histories:
            return None
        lines = self.histories[name]
        bucket: dict[str, Any] = {"id": "B", "name": name, "displayName": name}
        bucket |= {"summaryMetrics": self.summaries.get(name, "{}"), "config": "{}", "tags": [], "notes": ""}
        bucket |= {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": '{"t": 1}'}
        return bucket | {"historyLineCount": len(lines), "historyTail": json.dumps(lines[-1:])}

    def stream(self, run: str, files: dict[str, Any]) -> None:
        """A piece of a run's files. A line that is sent again stands where it stood."""
        history = files.get("wandb-history.jsonl")
        if history:
            lines, at = self.histories[run], history["offset"]
            if at > len(lines):
                self.offset_errors.append(f"{run}: at {at} of {len(lines)}")
            lines[at : at + len(history["content"])] = history["content"]
        if "wandb-summary.json" in files:
            self.summaries[run] = files["wandb-summary.json"]["content"][-1]

    def close(self) -> None:
        self.hanging = False
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.asked.set()
        while self.server.hanging:
            time.sleep(0.1)
        if self.server.away:
            self._send(503, {"error": "away"})
            return
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        if self.path == "/graphql":
            asked = json.loads(body)
            operation = OPERATION.search(asked["query"])
            assert operation is not None
            self._send(200, {"data": self.server.answer(operation[1], asked.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(body).get("files") or {})
            self._send(200, {})
        else:
            self._send(404, {})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""
