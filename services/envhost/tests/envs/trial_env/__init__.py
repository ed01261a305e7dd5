"""An environment for tests: each task behaves as its name says."""

import asyncio
import contextlib
import os
import re
import sys
import time

import verifiers.v1 as vf
from verifiers.v1.semantic import ParentLink

MODES = (
    "ok",
    "prints",
    "setup_raises",
    "reward_raises",
    "reward_nan",
    "run_raises",
    "wedges",
    "scores_slowly",
    "exits",
    "two_turns",
    "exits_once",
    "reply_decides",
    "metric_raises",
    "metric_nan",
    "quits",
    "gives_up",
    "cancels_itself",
    "raises_half_a_pair",
    "says_half_a_pair",
    "reward_sleeps",
    "reward_spins",
    "reward_backtracks",
    "never_gives_up",
    "says_too_much",
)


class Panic(BaseException):
    """As libraries in other languages raise."""


def raise_(error):
    raise error


# What the reward function does, by what the model said.
BY_REPLY = {
    "fine": lambda: 2.0,
    "zero": lambda: 0.0,
    "raise": lambda: 1 / 0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("-inf"),
    "huge": lambda: 10.0**400,
    "text": lambda: "seven",
    "none": lambda: None,
    "exit": lambda: sys.exit("a scorer that thinks it is a program"),
    "interrupt": lambda: raise_(KeyboardInterrupt("nobody pressed it")),
    "panic": lambda: raise_(Panic("index out of bounds")),
    "closes": lambda: raise_(GeneratorExit()),
    "cancelled": lambda: raise_(asyncio.CancelledError()),
}


class TrialData(vf.TaskData):
    mode: str


class TrialTask(vf.Task[TrialData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.mode == "setup_raises":
            raise KeyError("no such row")

    @vf.reward(weight=0.5)
    async def length(self, trace: vf.Trace) -> float:
        match self.data.mode:
            case "reward_raises":
                raise ZeroDivisionError("a scorer's bug")
            case "reward_nan":
                return float("nan")
            case "scores_slowly":
                await asyncio.sleep(30)
            case "reward_sleeps":
                time.sleep(600)  # noqa: ASYNC251 - blocking the loop is the point
            case "reward_spins":
                spin()
            case "reward_backtracks":
                re.fullmatch("(a+)+", 60 * "a" + "b")
            case "reply_decides":
                return BY_REPLY[trace.last_reply]()
        if trace.last_reply.startswith("summary"):
            # As harnesses say that compact their context.
            link = ParentLink(node=len(trace.nodes) - 1, type="compaction_attempt")
            trace.nodes[-1].semantic_parents.append(link)
            if trace.last_reply == "summary, taken":
                trace.nodes[0].semantic_parents.append(link.model_copy(update={"type": "compaction"}))
        if trace.last_reply.startswith("mask"):
            first, *_, last = (node for node in trace.nodes if node.sampled)
            first.mask = [False] * len(first.mask)
            last.mask[-1] = False
        return float(len(trace.last_reply))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        if self.data.mode == "metric_raises":
            raise LookupError("a metric's bug")
        if self.data.mode == "metric_nan":
            return float("nan")
        return float(trace.num_turns)


def spin():
    while True:
        pass


class TrialConfig(vf.TasksetConfig):
    greeting: str = "hello"
    once_file: str = ""


class TrialTaskset(vf.Taskset[TrialTask, TrialConfig]):
    def load(self):
        for mode in MODES:
            prompt = f"{self.config.greeting} {mode}"
            yield TrialTask(TrialData(prompt=prompt, mode=mode), self.config.task)


def exit_unless_marked(once_file):
    if not os.path.exists(once_file):
        open(once_file, "w").close()
        os._exit(4)


class TrialEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        mode = task.data.mode
        if mode == "prints":
            os.write(1, b"\x00\x01 not a frame \xff" * 1000)
            print("nor this", flush=True)
        if mode == "run_raises":
            raise RuntimeError("the environment's bug")
        while mode == "never_gives_up":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
        if mode == "wedges":
            time.sleep(60)  # noqa: ASYNC251 - blocking the loop is the point
        if mode == "quits":
            sys.exit("the environment thinks that it is a program")
        if mode == "gives_up":
            raise TimeoutError("the environment's own clock")
        if mode == "cancels_itself":
            raise asyncio.CancelledError
        if mode == "raises_half_a_pair":
            raise RuntimeError("no such emoji: \ud83d")
        if mode == "exits":
            sys.stdout.flush()
            os._exit(3)
        if mode == "exits_once":
            exit_unless_marked(self.config.taskset.once_file)
        if mode in ("says_half_a_pair", "says_too_much"):
            async with agents.agent.interaction(task) as talk:
                await talk.turn()
                await talk.turn("cut off: \ud83d" if mode == "says_half_a_pair" else 5_000_000 * "x")
            return
        if mode != "two_turns":
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("again")
            await talk.turn("and again")


__all__ = ["TrialEnv", "TrialTaskset"]
