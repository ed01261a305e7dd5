"""Environments of a file of prime-rl, in each form that they have had: `id` and `args` of a classic one;
`taskset` and `harness`, or `env.taskset` and `env.agent`, of one of Verifiers' v1.

A v1 environment gets as `args` what its taskset and its environment take (docs/environments.md). Harness
"null" on the local machine is what the host does by itself, also where none is named: that is told, since
Verifiers' own default is another agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from quartet.run.dialect import RunDraft, Tables, refuse, shown
from quartet.run.hosted import MAX_RETRIES, MAX_TIMEOUT_SECONDS
from quartet.run.prime_rl.given import Given, Said, leave_rest
from quartet.run.prime_rl.keys import LEFT_OUT_OF_ENV, REFUSED_OF_ENV

#: A host that runs a task's only agent by itself.
BY_ITSELF: Final = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
#: Of an entry, what means something in training alone, and in evaluations alone.
OF_TRAINING: Final = ("ratio", "weight", "algo", "curriculum")
OF_EVALUATIONS: Final = ("interval", "num_examples", "num_tasks")
_ZERO: Final = {"reject_min": 0.0, "reject_max": 0.0}
_NO_VALUE: Final = object()
_UNNAMED: Final = (
    'prime-rl plays it by "bash" in a sandbox; here it is a chat with the tools of the taskset, unless that '
    "brings a harness; name one, with its runtime"
)


@dataclass(frozen=True)
class Environment:
    """An entry of a list of them."""

    #: As an [[env]].
    table: Tables
    ratio: Said
    group_size: Said
    sampling: Said
    algo: Said
    interval: Said
    num_examples: Said
    #: What says that groups without a signal are replaced; None where nothing does.
    gate: Said | None


def environment(given: Given, run: RunDraft, shared_retries: Said, *, measures: bool = False) -> Environment:
    """Of one entry; of an evaluation where it `measures`. Raises ConfigError."""
    run.leave(
        given.idle("it is of training", *OF_TRAINING)
        if measures
        else given.idle("it is of evaluations", *OF_EVALUATIONS)
    )
    table = _v1(given, run) if _is_v1(given) else _classic(given)
    table["args"] = _told(table["args"], given.named("args"), run)
    name = given.take("name")
    if name.value is not None:
        table["name"] = name.value
    limit = given.take("timeout_seconds", "timeout.rollout" if _is_table(given, "timeout") else "timeout")
    if limit.value is not None:
        table["timeout_seconds"] = min(limit.number(), MAX_TIMEOUT_SECONDS)
    # Without a limit a rollout has as long as it takes.
    table.setdefault("timeout_seconds", MAX_TIMEOUT_SECONDS)
    own = given.take("max_retries")
    retries = own if own.is_given else shared_retries
    if retries.value is not None:
        table["max_retries"] = min(retries.count(0), MAX_RETRIES)
    found = Environment(
        table=table,
        ratio=given.take("ratio", "weight"),
        group_size=given.take("group_size", "rollouts_per_example"),
        sampling=given.take("sampling", default={}),
        algo=given.take("algo"),
        interval=given.take("interval"),
        num_examples=given.take("num_examples", "num_tasks"),
        gate=_gate(given),
    )
    leave_rest(given, run, LEFT_OUT_OF_ENV, REFUSED_OF_ENV)
    return found


def _told(args: Tables, place: str, run: RunDraft) -> Tables:
    """Without values that are none, which a run's file cannot say."""
    found: Tables = {}
    for key, value in args.items():
        if value is None:
            run.leave([shown(f"{place}.{key}", None, "the environment's own default holds")])
        else:
            found[key] = _told(value, f"{place}.{key}", run) if isinstance(value, dict) else value
    return found


def _is_table(given: Given, path: str) -> bool:
    return isinstance(given.peek(path), dict)


def _is_v1(given: Given) -> bool:
    return given.peek("taskset") is not None or given.peek("env") is not None


def _classic(given: Given) -> Tables:
    named = given.take("id")
    if not isinstance(named.value, str) or not named.value:
        refuse(given.named("id"), named.value, "name the environment's package")
    return {"id": named.value, "args": given.take("args", default={}).table()}


def _v1(given: Given, run: RunDraft) -> Tables:
    place = "env" if given.peek("env") is not None else ""
    whole = given.take("env", default={}).table() if place else {}
    taskset = whole.pop("taskset", None) if place else given.take("taskset", default={}).value
    if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
        refuse(given.named("env.taskset" if place else "taskset"), taskset, 'name the taskset: id = "..."')
    agent = whole.pop("agent", {}) if place else _agent_beside(given)
    if not isinstance(agent, dict):
        refuse(given.named("env.agent"), agent, "should be a table")
    if not any("harness" in role for role in (agent, *whole.values()) if isinstance(role, dict)):
        run.leave([shown(given.named("env.agent.harness" if place else "harness"), None, _UNNAMED)])
    args = {key: value for key, value in taskset.items() if key != "id"}
    roles = {"env" if key == "id" else key: _role(value) for key, value in whole.items()}
    args |= {key: value for key, value in roles.items() if value != {}}
    args |= given.take("args", default={}).table()
    agent = _role(agent)
    timeout = agent.get("timeout")
    table: Tables = {"id": taskset["id"], "args": args}
    if isinstance(timeout, dict) and isinstance(timeout.get("rollout"), int | float):
        table["timeout_seconds"] = min(float(timeout["rollout"]), MAX_TIMEOUT_SECONDS)
    if agent:
        args["agent"] = agent
    return table


def _agent_beside(given: Given) -> Tables:
    """The one agent, where what is its stands beside the taskset."""
    keys = ("harness", "runtime", "max_turns", "max_output_tokens", "max_input_tokens")
    said = {key: given.take(key).value for key in keys}
    return {key: value for key, value in said.items() if value is not None}


def _role(agent: Any) -> Any:
    """An agent without what the host does by itself; the runtime may be in its harness."""
    if not isinstance(agent, dict) or not isinstance(harness := agent.get("harness", {}), dict):
        return agent
    inside = {"runtime": harness["runtime"]} if "runtime" in harness else {}
    plain = {key: value for key, value in harness.items() if key != "runtime"}
    others = {key: value for key, value in agent.items() if key != "harness"}
    whole = {**inside, **others, **({"harness": plain} if plain else {})}
    if plain != BY_ITSELF["harness"]:  # the runtime is then of a harness that may execute what its model says
        return whole
    return {key: value for key, value in whole.items() if value != BY_ITSELF.get(key, _NO_VALUE)}


def _gate(given: Given) -> Said | None:
    """A gate that rejects groups without a signal. Raises ConfigError for any other."""
    found: Said | None = None
    gates = given.take("curriculum.gates", default={})
    for name, gate in gates.table().items():
        if gate not in ({"type": "advantage_range"}, {"type": "advantage_range", **_ZERO}):
            remedy = (
                "groups are judged by whether they have a signal; write "
                '{ type = "advantage_range" } for that, or remove it'
            )
            refuse(f"{gates.source}.{name}", gate, remedy)
        found = gates
    return found
