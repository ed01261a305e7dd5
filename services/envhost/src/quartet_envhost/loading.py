"""Loading an environment into its worker, by the Verifiers of the worker's interpreter.

1. Only the adapter that this interpreter can run is imported: the other cannot be.
2. Whatever the environment's own code raises is a refusal to load (ENVIRONMENT_UNAVAILABLE), with where it
   was raised. Its data is read, too, so that what is wrong with it shows now.
3. From before the environment is imported on, its worker can be asked for its stack (stack.py).
"""

from __future__ import annotations

import copy
import gc
import importlib
import sys
from dataclasses import dataclass
from typing import Any, Final

from quartet.errors import QuartetError
from quartet.kit.imports import uncollected

from quartet_envhost import consists
from quartet_envhost.config import check_version
from quartet_envhost.own_code import OwnCode
from quartet_envhost.stack import write_when_asked

# Rollouts under way are many small objects, nearly none of them garbage; looking through them at Python's own
# thresholds is a sixth of a rollout's CPU. What a cycle holds waits for so many objects instead, some 20 MiB.
GC_THRESHOLDS: Final = (100_000, 20, 50)
# The adapter that each line of Verifiers is run by.
GENERATIONS: Final = {"0.4.": "v1", "0.3.": "classic"}
# What environments of each import besides. Of classic ones nothing: they may set variables of the `datasets`
# library before they import it, and it starts a thread.
_AHEAD: Final = {"v1": ("verifiers.v1.tasksets",), "classic": ()}


@dataclass(frozen=True)
class Loaded:
    """An environment, ready to run."""

    env_id: str
    #: A HostedEnvironment, of v1 or classic.
    environment: Any
    own: OwnCode
    #: An EnvironmentInfo, serialised.
    info: bytes


def load(settings: dict[str, Any]) -> Loaded:
    """The environment that the front names in its settings. Raises QuartetError."""
    with uncollected():
        hosted = importlib.import_module(f"quartet_envhost.{_generation()}.environment")
    env_id = settings["id"]
    own = OwnCode(env_id)
    if "stack_fd" in settings:  # not of a front of an earlier release
        write_when_asked(settings["stack_fd"], own.files)
    check_version(env_id)
    given = copy.deepcopy(settings["args"])  # Verifiers puts what it makes of them in their place
    try:
        environment = hosted.HostedEnvironment(env_id, settings["args"], own)
        info = environment.describe()
        consists.tell(info, given, own.files.has, environment.tasks)
        loaded = Loaded(env_id, environment, own, info.SerializeToString())
    except QuartetError:
        raise
    # The environment's own code: whatever it raises is a refusal to load, reported as such.
    except Exception as error:
        text = f"environment {env_id!r} does not load: {own.text_of(error)}"
        raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=env_id) from error
    # The garbage collector need not walk the hundred thousands of objects that Verifiers and its imports
    # leave.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    return loaded


def import_ahead() -> None:
    """What all environments of this interpreter need, and nothing of one. Raises what imports raise."""
    with uncollected():
        generation = _generation()
        for module in (f"quartet_envhost.{generation}.environment", *_AHEAD[generation]):
            importlib.import_module(module)


def _generation() -> str:
    """The adapter for the Verifiers of this interpreter."""
    try:
        import verifiers
    except ImportError as error:
        text = f"interpreter {sys.executable} has no verifiers; install 'quartet-envhost[verifiers]' into it"
        raise QuartetError("INVALID_CONFIG", text, key="python", value=sys.executable) from error
    version = verifiers.__version__
    for line, generation in GENERATIONS.items():
        if version.startswith(line):
            return generation
    text = f"interpreter {sys.executable} has verifiers {version}; hosted are 0.4 (v1) and 0.3 (classic)"
    raise QuartetError("INVALID_CONFIG", text, key="python", value=sys.executable)
