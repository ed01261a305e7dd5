"""[orchestrator.eval] of prime-rl: on a fixed interval, each environment on all its examples by default."""

from __future__ import annotations

from typing import Any

from quartet.run.dialect import RunDraft, refuse
from quartet.run.evaluation import ALL_EXAMPLES
from quartet.run.hosted import MAX_TIMEOUT_SECONDS
from quartet.run.prime_rl import sampling
from quartet.run.prime_rl.environments import environment
from quartet.run.prime_rl.given import Given, Said, one_of_all


def evaluations(given: Given, run: RunDraft, own_steps: Any = None) -> None:
    """The table [eval] of a run. `own_steps`: how long it is in Quartet's own words, which win. Raises
    ConfigError."""
    if given.peek("orchestrator.eval") is None:
        given.take("orchestrator.eval")  # it may be "None"
        run.put("eval.num_examples", 0, "prime-rl's default of orchestrator.eval")
        return
    retries = given.take("orchestrator.eval.max_retries")
    entries = given.entries("orchestrator.eval.source", "orchestrator.eval.env")
    found = [environment(one, run, retries, measures=True) for one in entries]
    shared = given.take("orchestrator.eval.interval", default=100)
    own = [one.interval if one.interval.is_given else shared for one in found]
    every = one_of_all("interval of evaluations", own) or shared
    run.put("eval.interval", every.count(), every.source)
    skips = given.take("orchestrator.eval.skip_first_step", default=False)
    base = given.take("orchestrator.eval.eval_base_model", default=True)
    run.put("eval.before", base.flag() and not skips.flag(), (skips if skips.value else base).source)
    # There a step is evaluated where the interval divides it; the last one is `after` here.
    steps = run.tables.get("max_steps") if own_steps is None else own_steps
    run.put("eval.after", isinstance(steps, int) and steps % every.value == 0, every.source)
    examples = given.take("orchestrator.eval.num_examples", "orchestrator.eval.num_tasks", default=-1)
    run.put("eval.num_examples", _all(examples), examples.source)
    paths = ("orchestrator.eval.group_size", "orchestrator.eval.rollouts_per_example")
    group = given.take(*paths, default=1)
    run.put("eval.rollouts_per_example", group.value, group.source)
    # There an evaluation has as long as it takes.
    run.put("eval.timeout_seconds", MAX_TIMEOUT_SECONDS, "prime-rl's default of orchestrator.eval")
    sampled = given.take("orchestrator.eval.sampling", default={})
    if not found:
        refuse("orchestrator.eval", {}, "give it environments, [[orchestrator.eval.source]]; or remove it")
    sampling.measured(sampled, found, run)
    for entry, one in zip(entries, found, strict=True):
        number = len(run.tables["eval"].setdefault("env", []))
        more = {"num_examples": one.num_examples, "rollouts_per_example": one.group_size}
        own_keys = {key: _all(said) for key, said in more.items() if said.value is not None}
        run.tables["eval"]["env"].append({**one.table, **own_keys})
        run.origins["eval", "env", str(number)] = entry.place


def _all(examples: Said) -> Any:
    return ALL_EXAMPLES if examples.value == -1 else examples.value
