"""A classic environment for tests: each example behaves as its `info` says."""

import asyncio
import functools
import multiprocessing
import sys
import time

import verifiers as vf

MODES = (
    "ok",
    "turns",
    "reward_raises",
    "reward_nan",
    "reward_text",
    "setup_raises",
    "response_raises",
    "sandbox_gone",
    "own_clock",
    "scores_slowly",
    "clock_put_back",
    "waits_if_told",
    "reward_sleeps",
    "reward_spins",
    "reward_cancelled",
    "reward_closes",
    "dicts",
    "untold",
    "processes",
)


TURNS = {
    "ok": 1,
    "reward_raises": 1,
    "reward_nan": 1,
    "clock_put_back": 1,
    "waits_if_told": 2,
    "reward_sleeps": 1,
    "reward_spins": 1,
    "reward_cancelled": 1,
    "reward_closes": 1,
    "dicts": 1,
    "untold": 1,
    "processes": 1,
}

LOADED = {}


def rows(greeting):
    from datasets import Dataset  # a second of CPU, which who does not load is spared

    prompts = [[{"role": "user", "content": f"{greeting} {mode}"}] for mode in MODES]
    return Dataset.from_dict(
        {"prompt": prompts, "answer": list(MODES), "info": [{"mode": mode} for mode in MODES]}
    )


def spin():
    while True:
        pass


async def processes() -> float:
    """A process of its own, as code is run by one, and what of Verifiers' is beside it."""
    from verifiers.rubrics.math_rubric import MathRubric

    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=lambda: there.send(LOADED["method"]))
    process.start()
    assert here.poll(10) and here.recv() is None, "Python's own choice, with what was loaded"
    process.join()
    pool = MathRubric().executor
    assert pool._mp_context.get_start_method() == "forkserver"
    assert pool._max_workers == min(4, multiprocessing.cpu_count())
    return float(asyncio.get_running_loop()._default_executor._max_workers)


async def length(completion, info, **kwargs) -> float:
    match info["mode"]:
        case "processes":
            return await processes()
        case "reward_raises":
            raise ZeroDivisionError("a scorer's bug")
        case "reward_nan":
            return float("nan")
        case "reward_text":
            return "seven"
        case "scores_slowly":
            await asyncio.sleep(30)
        case "reward_sleeps":
            time.sleep(600)  # noqa: ASYNC251 - blocking the loop is the point
        case "reward_spins":
            spin()
        case "reward_cancelled":
            other = asyncio.create_task(asyncio.sleep(600))
            other.cancel()
            await other
        case "reward_closes":
            raise GeneratorExit
        case "clock_put_back":
            kwargs["state"]["timing"].scoring.start += 3600
        case "untold":
            kwargs["state"]["prompt"] = [{"role": "narrator", "content": "once"}]
    return float(len(completion[-1]["content"]))


def said_hello(completion) -> float:
    return float("hello" in completion[-1]["content"])


class TrialEnv(vf.MultiTurnEnv):
    async def setup_state(self, state):
        if state["info"]["mode"] == "setup_raises":
            raise KeyError("no such row")
        if state["info"]["mode"] == "dicts":
            parts = [{"type": "text", "text": part} for part in ("as a dict", "of parts")]
            state["prompt"] = [{"role": "user", "content": parts}]

    async def env_response(self, messages, state, **kwargs):
        match state["info"]["mode"]:
            case "response_raises":
                raise RuntimeError("the environment's bug")
            case "sandbox_gone":
                raise vf.SandboxError("lost the sandbox")
            case "waits_if_told" if messages[-1]["content"] == "stay":
                await asyncio.sleep(30)
            case "own_clock":
                await asyncio.sleep(30)
        step = state["trajectory"][-1]
        if messages[-1]["content"] == "mask":
            step["tokens"]["completion_mask"] = [0] * len(step["tokens"]["completion_mask"])
        return [{"role": "user", "content": "again"}]

    @vf.stop
    async def enough(self, state) -> bool:
        turns = len(state["trajectory"])
        return turns >= TURNS.get(state["info"]["mode"], 3)


def rank(completions) -> list[float]:
    """How many of the group said less."""
    said = [completion[-1]["content"] for completion in completions]
    if "break the group" in said:
        raise LookupError("a group scorer's bug")
    if "too many" in said:
        return [1.0] * (len(said) + 1)
    if "a table" in said:
        return dict.fromkeys(range(len(said)), 1.0)
    if "in order" in said:
        return [float(number) for number in range(len(said))]
    return [float("nan") if one == "nan" else float(sum(len(o) < len(one) for o in said)) for one in said]


async def own(completion) -> float:
    await asyncio.sleep(0)  # where the others of its group are scored
    if completion[-1]["content"] == "raise":
        raise ZeroDivisionError("a scorer's bug")
    if completion[-1]["content"] == "exit":
        sys.exit("a scorer that thinks it is a program")
    return 1.0


def scaled(by: float = 1.0, **kwargs) -> float:
    return by


class Scaled:
    def __init__(self, by: float):
        self.by = by

    def __call__(self, completion) -> float:
        return self.by


def half() -> str:
    """Half a surrogate pair, which no message can carry."""
    return "half \ud800"


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two integers.

    Args:
        a: One.
        b: The other.
    """
    return a / b


def load_environment(
    kind: str = "trial",
    greeting: str = "hello",
    seconds: float | None = None,
    sampling: dict | None = None,
):
    LOADED["method"] = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork")
    if kind == "tools":
        from datasets import Dataset

        data = Dataset.from_dict({"question": ["what is 40 plus 2?"], "answer": ["42"]})
        rubric = vf.Rubric(funcs=[right])
        return vf.ToolEnv(
            dataset=data,
            tools=[add, divide, half],
            rubric=rubric,
            max_turns=5,
            stop_errors=[ZeroDivisionError],
        )
    if kind == "names":
        rubric = vf.Rubric(
            funcs=[functools.partial(scaled, 2.0), Scaled(3.0), scaled], weights=[1.0, 1.0, 0.0]
        )
        return vf.SingleTurnEnv(dataset=rows(greeting), rubric=rubric)
    if kind in ("groups", "mixture"):
        env = TrialEnv(dataset=rows(greeting), rubric=vf.Rubric(funcs=[rank, own], weights=[2.0, 1.0]))
        if kind == "groups":
            return env
        other = vf.SingleTurnEnv(dataset=rows("bye").select([0]), rubric=vf.Rubric(funcs=[said_hello]))
        return vf.EnvGroup([vf.EnvGroup([env, other])])
    rubric = vf.Rubric(funcs=[length], weights=[0.5])
    rubric.add_metric(said_hello)
    return TrialEnv(
        dataset=rows(greeting),
        eval_dataset=rows("bye").select([0]),
        rubric=rubric,
        timeout_seconds=seconds,
        sampling_args=sampling,
    )


def right(completion, answer) -> float:
    return float(answer in completion[-1]["content"])
