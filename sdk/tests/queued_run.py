"""What stands for `quartet rl` and `quartet node` in a job of SLURM: as they treat signals, folders and each
other, without a run.

    QUEUED_RUN_STEPS    after so many it is completed (default: never)
    QUEUED_RUN_DEAF     seconds until it listens to signals (default: 0)
    QUEUED_RUN_STOP     seconds that the step under way takes (default: 0.5)
    QUEUED_RUN_HOLD     a file until which it takes longer (default: none)
    QUEUED_RUN_FAILS    the host whose node fails after a second
    QUEUED_RUN_CODE     how it ends at once, without a step
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

STEP_SECONDS = 0.2
PLAN = Path("machines", "plan.json")


def rl(words: list[str]) -> int:
    folder = Path(words[words.index("--output-dir") + 1])
    note(folder, {"rl": words, "shown": os.environ.get("SHOWN", "")})
    if code := os.environ.get("QUEUED_RUN_CODE"):
        return int(code)
    time.sleep(float(os.environ.get("QUEUED_RUN_DEAF", "0")))
    stop_at: list[float] = []

    def asked(number: int, _: FrameType | None) -> None:
        note(folder, {"signal": signal.Signals(number).name})
        if not stop_at:
            stop_at.append(time.monotonic() + float(os.environ.get("QUEUED_RUN_STOP", "0.5")))
        elif number != signal.SIGHUP:
            note(folder, {"killed": True})
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, asked)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, asked)
    if "--resume" not in words:
        (folder / PLAN).parent.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text("{}")
    (folder / PLAN).parent.mkdir(parents=True, exist_ok=True)
    (folder / PLAN).write_text("goes on")
    metrics = folder / "metrics.jsonl"
    last = int(os.environ.get("QUEUED_RUN_STEPS", "1000000"))
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    hold = Path(os.environ.get("QUEUED_RUN_HOLD", "/"))
    while done < last and not (stop_at and time.monotonic() > stop_at[0] and hold.exists()):
        time.sleep(STEP_SECONDS)
        done += 1
        with metrics.open("a") as file:
            file.write(f"{done}\n")
    (folder / PLAN).write_text("ended")
    note(folder, {"ended": "completed" if done >= last else "stopped"})
    return 0 if done >= last else 130


def node(words: list[str]) -> int:
    folder, host = Path(words[0]), words[words.index("--host") + 1]
    note(folder, {"node": host})
    if os.environ.get("QUEUED_RUN_FAILS") == host:
        time.sleep(1)
        return 1
    plan = folder / PLAN
    while not (plan.exists() and plan.read_text() == "ended"):
        time.sleep(STEP_SECONDS)
    return 0


def note(folder: Path, line: dict[str, object]) -> None:
    with Path(f"{folder}.noted").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit({"rl": rl, "node": node}[sys.argv[1]](sys.argv[2:]))
