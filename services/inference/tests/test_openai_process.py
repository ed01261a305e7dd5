"""The front as it is deployed: a process, its configuration, TLS, its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pydantic
import pytest
from quartet.config import ConfigError
from quartet.kit.health import Health
from quartet_inference import app
from quartet_inference.config import InferenceConfig
from quartet_inference.openai.config import OpenAiConfig

START_SECONDS = 120  # importing torch on a loaded machine


@contextmanager
def process(folder: Path, model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A replica with a front, and the front's address."""
    port_file = folder / "front.port"
    command = [sys.executable, "-m", "quartet_inference", "--model", str(model), "--max-model-len", "256"]
    command += ["--openai.address", "127.0.0.1:0", "--openai.port-file", str(port_file), *arguments]
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            assert running.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield running, port_file.read_text().strip()
    finally:
        running.kill()
        running.wait()


async def test_a_signal_lets_running_requests_end(model_folder: Path, tmp_path: Path) -> None:
    with process(tmp_path, model_folder, "--server.drain-seconds", "60") as (running, address):
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=60, max_retries=0)
        name = client.models.list().data[0].id
        stream = client.completions.create(
            model=name, prompt="hi", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
        )
        text = next(stream).choices[0].text
        running.send_signal(signal.SIGTERM)
        pieces = [chunk.choices[0] for chunk in stream]
        assert pieces[-1].finish_reason == "length" and (text or pieces)
        assert await asyncio.to_thread(running.wait, 90) == 0, (tmp_path / "log").read_text()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_certificate(*files)
    return files


def make_certificate(cert: Path, key: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)


async def test_tls(model_folder: Path, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    tls = ("--openai.tls.cert-file", str(certificate[0]), "--openai.tls.key-file", str(certificate[1]))
    with process(tmp_path, model_folder, *tls) as (_, address):
        context = ssl.create_default_context(cafile=str(certificate[0]))
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://{address}/v1/models", ssl=context) as response,
        ):
            assert response.status == 200
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{address}/v1/models")
            await asyncio.to_thread(make_certificate, *certificate)
            with pytest.raises(aiohttp.ClientSSLError):
                await session.get(f"https://{address}/v1/models", ssl=context)
            context = ssl.create_default_context(cafile=str(certificate[0]))
            async with session.get(f"https://{address}/v1/models", ssl=context) as response:
                assert response.status == 200, "it shows the pair that its files have now"


async def test_what_cannot_be_served_is_said_in_one_sentence(model_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        cases: list[tuple[dict[str, Any], str]] = [
            ({"openai": {"address": "127.0.0.1:0", "api_key_file": tmp_path / "nothing"}}, "cannot be read"),
            ({"openai": {"address": busy}}, "choose another port"),
            (
                {"openai": {"address": "127.0.0.1:0", "port_file": tmp_path / "none" / "port"}},
                "openai.port_file = .* cannot be written",
            ),
            ({"chat": {"tool_parser": "unheard-of"}}, "choose auto, none, hermes"),
        ]
        for settings, why in cases:
            config = InferenceConfig.model_validate({"model": model_folder, "max_model_len": 64, **settings})
            with pytest.raises(ConfigError, match=why):
                async with app.services(config, Health()):
                    pass


def test_a_door_off_loopback_is_locked() -> None:
    tls = {"cert_file": "c.pem", "key_file": "k.pem"}
    for settings, why in (
        ({"address": "0.0.0.0:1"}, "plaintext"),
        ({"address": "0.0.0.0:1", "api_key_file": "key"}, "plaintext"),
        ({"address": "0.0.0.0:1", "tls": tls}, "lets everybody in"),
    ):
        with pytest.raises(pydantic.ValidationError, match=why):
            OpenAiConfig.model_validate(settings)
    for allowed in (
        {"address": ""},
        {"address": "127.0.0.1:1"},
        {"address": "0.0.0.0:1", "tls": tls, "api_key_file": "key"},
        {"address": "0.0.0.0:1", "tls": {**tls, "client_ca_file": "ca.pem"}},
        {"address": "0.0.0.0:1", "insecure_ok_off_loopback": True},
    ):
        OpenAiConfig.model_validate(allowed)
