"""An environment for tests that takes more than it may, as its tasks' names say."""

import asyncio
import subprocess
import sys
import tempfile
import time

import verifiers.v1 as vf

MODES = ("ok", "eats", "children_eat", "forks", "writes", "blocks", "leaves_children")
MIB = 2**20


class GreedyData(vf.TaskData):
    mode: str


class GreedyTask(vf.Task[GreedyData]):
    @vf.reward
    async def one(self, trace: vf.Trace) -> float:
        return 1.0


class GreedyConfig(vf.TasksetConfig):
    pid_file: str = ""


class GreedyTaskset(vf.Taskset[GreedyTask, GreedyConfig]):
    def load(self):
        for mode in MODES:
            yield GreedyTask(GreedyData(prompt=mode, mode=mode), self.config.task)


def sleeper(code="", **options):
    return subprocess.Popen([sys.executable, "-S", "-c", f"{code}\nimport time; time.sleep(600)"], **options)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


async def take(mode, pid_file):
    match mode:
        case "eats":
            held = []
            while True:
                held.append(bytearray(b"x") * (64 * MIB))
                await asyncio.sleep(0.02)
        case "children_eat":
            sleeper(f"held = bytearray(b'x') * ({1200 * MIB})", start_new_session=True)
            await asyncio.sleep(600)
        case "forks":
            for _ in range(60):
                sleeper(process_group=0)
                await asyncio.sleep(0)
            await asyncio.sleep(600)
        case "leaves_children":
            pids = [sleeper(start_new_session=True).pid, sleeper(process_group=0).pid]
            write(pid_file, " ".join(map(str, pids)))
            await asyncio.sleep(600)
        case "writes":
            with tempfile.TemporaryFile() as file:
                while True:
                    file.write(b"x" * MIB)
                    await asyncio.sleep(0)
        case "blocks":
            time.sleep(600)  # noqa: ASYNC251 - blocking the loop is the point


class GreedyEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        await take(task.data.mode, self.config.taskset.pid_file)
        await agents.agent.run(task)


__all__ = ["GreedyEnv", "GreedyTaskset"]
