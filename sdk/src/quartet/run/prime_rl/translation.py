"""The dialect of prime-rl, Prime Intellect's trainer: its TOML as a run.

1. Every key is translated to what does the same here, or has no effect here and is told as such, or is
   refused in one sentence. Nothing is ignored silently.
2. What a file leaves out has the default that it has in prime-rl VERSION, not Quartet's. How often states are
   saved, and what is kept in memory, is Quartet's own affair.
3. Forms of other releases are read, too: `[[orchestrator.env]]` or `[[orchestrator.train.source]]`,
   `rollouts_per_example` or `group_size`, `[inference.parallel]` or `[inference.vllm]`. Whoever has keys that
   came after VERSION is told whose defaults there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.run.dialect import Engine, RunDraft, Tables, Translation, Untranslated, give_way, refuse, shown
from quartet.run.presets import PRESETS
from quartet.run.prime_rl import evaluations, machines, placement, rollouts, sampling, training
from quartet.run.prime_rl.environments import Environment, environment
from quartet.run.prime_rl.given import Given, Part, Said, told_together
from quartet.run.prime_rl.keys import AFTER_VERSION, LEFT_OUT, OF_A_JOB, REFUSED, SERVICES

#: Whose defaults these are.
VERSION: Final = "0.8.0"
_TABLES: Final = (*SERVICES, "ckpt", "wandb", "deployment", "monitors", "log", "slurm")
#: Where services are started elsewhere, nothing of it is read.
_PLACED: Final = (
    *("deployment", "slurm", "inference.deployment", "inference.slurm", "slurm_template"),
    *machines.AT_THE_TOP,
    *(key for key in OF_A_JOB if "." not in key),
)
_NOTHING: Final[Mapping[str, Any]] = {}
#: Of [algorithm], what judges groups by their rewards.
_OF_A_CHOICE: Final = ("dynamic_sampling", "max_resample")
_OF_A_SIGNAL: Final = ("zero_advantage_filtering", *_OF_A_CHOICE)
#: Keys of the orchestrator that [environment] may have among its args, and what they are called there, too.
_OF_THE_ORCHESTRATOR: Final = {
    "rollouts_per_example": ("rollouts_per_example", "group_size", "train.group_size"),
    "max_concurrent": (
        *("max_concurrent", "max_inflight_rollouts", "max_inflight_groups", "oversampling_factor"),
        "concurrency.max_inflight",
    ),
}
_ELSEWHERE: Final = "where the services are, they have their devices"


def translate(
    tables: Mapping[str, Any],
    engine: Engine = "embedded",
    *,
    starts_services: bool = True,
    has_two_gpus: bool = False,
    own: Mapping[str, Any] = _NOTHING,
) -> Translation:
    """The run. `starts_services`: on this machine, so that devices are looked at; `has_two_gpus`: it, so that
    trainer and embedded engine get one each. `own`: what is said beside the file in Quartet's own words,
    which will be laid over it.

    Raises ConfigError where a table is none, and else Untranslated.
    """
    for name in _TABLES:
        if not isinstance(tables.get(name, {}), dict) and tables[name] != "None":
            refuse(name, tables[name], "should be a table")
    given, run = Given(tables), RunDraft()
    here = {"starts_services": starts_services, "has_two_gpus": has_two_gpus}
    refused, silent = told_together(_parts(given, run, engine, own, **here))
    _give_way(run, own)
    if engine == "embedded":
        run.leave(placement.unread_of(own))
    refused += _unread(given, run, silent, starts_services=starts_services)
    if refused:
        raise Untranslated(together(refused), run.finished())
    return run.finished()


def _parts(
    given: Given,
    run: RunDraft,
    engine: Engine,
    own: Mapping[str, Any],
    *,
    starts_services: bool,
    has_two_gpus: bool,
) -> tuple[Part, ...]:
    """In their order."""
    found: list[Environment] = []
    return (
        (lambda: training.model(given, run), ("model", "trainer")),
        (lambda: _length(given, run, own), ("trainer", "orchestrator")),
        (lambda: _environments(given, run, found), ("orchestrator",)),
        (lambda: rollouts.batches(given, run, found), ("orchestrator",)),
        (lambda: rollouts.pace(given, run), ("orchestrator",)),
        (lambda: rollouts.credit(given, run, found), ("orchestrator",)),
        (lambda: training.loss(given, run), ("trainer.loss",)),
        (lambda: training.optimizer(given, run), ("trainer.optim",)),
        (lambda: training.schedule(given, run), ("trainer.scheduler", "trainer.optim")),
        (lambda: training.adapter(given, run), ("trainer.model", "orchestrator.model")),
        (lambda: sampling.trained(given, run, found), ("orchestrator",)),
        (lambda: evaluations.evaluations(given, run, own.get("max_steps")), ("orchestrator.eval",)),
        (lambda: training.states(given, run), ("ckpt", "trainer.ckpt", "orchestrator.ckpt")),
        (lambda: placement.engine(given, run, engine), ("inference",)),
        (
            lambda: machines.devices(
                given, run, engine, starts_services=starts_services, has_two_gpus=has_two_gpus
            ),
            ("inference", "deployment", *machines.DEVICES, "slurm", *machines.AT_THE_TOP),
        ),
        (lambda: machines.job(given, run) if starts_services else None, ("slurm", *machines.AT_THE_TOP)),
        (lambda: placement.reports(given, run), ("wandb", "monitors", "trainer", "orchestrator")),
        (lambda: _names(given, run), ("run",)),
    )


def counts_on_later(tables: Mapping[str, Any]) -> list[str]:
    """Keys of the tables that came after VERSION."""
    given = Given(tables)
    return [path for path in AFTER_VERSION if given.peek(path) is not None]


def _unread(given: Given, run: RunDraft, silent: list[str], *, starts_services: bool) -> list[ConfigError]:
    elsewhere = OF_A_JOB if starts_services else dict.fromkeys(_PLACED, _ELSEWHERE)
    left = {**LEFT_OUT, **elsewhere}
    refused = REFUSED if starts_services else {k: v for k, v in REFUSED.items() if k not in left}
    found = list(given.rest(left, refused, silent))
    run.leave(one for one in found if isinstance(one, str))
    return [one for one in found if isinstance(one, ConfigError)]


def _give_way(run: RunDraft, own: Mapping[str, Any]) -> None:
    """A loss or a preset of Quartet's own is that loss alone, without keys of the one that it replaces; and
    where rewards are not compared, or a filter of Quartet's own chooses the groups, the file's does not. So
    does the temperature of evaluations give way, which has two places."""
    said, chooses = (
        one if isinstance(one := own.get(key), dict) else {} for key in ("algorithm", "difficulty_filter")
    )
    algorithm, preset = run.tables.get("algorithm", {}), said.get("preset")
    give_way(algorithm, said)
    values = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    gone: tuple[str, ...] = ()
    if {**values, **said}.get("advantage") in ("none", "zero"):
        gone = _OF_A_SIGNAL
    if chooses.get("enabled") is True:
        gone = (*gone, *_OF_A_CHOICE)
    for key in gone:
        algorithm.pop(key, None)
    measured = own.get("eval")
    if isinstance(measured, dict) and "temperature" in measured:
        run.tables.get("eval", {}).get("sampling", {}).pop("temperature", None)


def _length(given: Given, run: RunDraft, own: Mapping[str, Any]) -> None:
    paths = ("max_steps", "trainer.max_steps", "orchestrator.max_steps")
    # What Quartet's own words say, an option by this key among them, wins over all of them.
    said = given.nearest(*paths) if "max_steps" in own else given.take(*paths)
    if said.value is not None:
        run.put("max_steps", said.value, said.source)
    elif "max_steps" not in own:
        refuse("max_steps", None, "a run ends here; set it, such as by --max-steps 200")


def _environments(given: Given, run: RunDraft, found: list[Environment]) -> None:
    paths = ("train.source", "train.env", "env")
    entries = given.entries(*(f"orchestrator.{path}" for path in paths))
    alone = given.take("orchestrator.environment")
    if alone.is_given:
        entries.append(Given(_without_keys_of_a_run(alone, given, run), alone.source))
    retries = given.take("orchestrator.train.max_retries")
    found += [environment(one, run, retries) for one in entries]
    weights = given.take("orchestrator.buffer.env_ratios", "orchestrator.env_mix")
    listed = weights.value if weights.value is not None else []
    if not isinstance(listed, list) or len(listed) not in (0, len(found)):
        refuse(weights.source, weights.value, "give a number for each environment, or remove it")
    for number, one in enumerate(found):
        if one.ratio.value is not None:
            one.table["weight"] = one.ratio.number()
        elif number < len(listed):
            one.table["weight"] = listed[number]
        run.origins["env", str(number)] = entries[number].place
    run.tables["env"] = [one.table for one in found]


def _without_keys_of_a_run(alone: Said, given: Given, run: RunDraft) -> Tables:
    """[environment] of 2025, whose example has two keys of the orchestrator among its args. They are the
    orchestrator's where it does not say them itself."""
    table = alone.table()
    if not isinstance(args := table.get("args"), dict):
        return table
    args = table["args"] = dict(args)
    for key, others in _OF_THE_ORCHESTRATOR.items():
        if key not in args or any(f"orchestrator.{other}" in given for other in others):
            continue
        source, value = f"{alone.source}.args.{key}", args.pop(key)
        run.leave([shown(source, value, f"as an argument of an environment; read as orchestrator.{key}")])
        if key == "rollouts_per_example":
            table.setdefault(key, value)
        else:
            run.put(key, value, source)
    return table


def _names(given: Given, run: RunDraft) -> None:
    for path, name in (("run.name", "run_name"), ("output_dir", "output_dir")):
        said = given.take(path)
        if not isinstance(said.value, str | None):
            refuse(said.source, said.value, 'should be text in quotes, such as "name"')
        run.names[name] = said.value or None
    shown_as = run.tables.get("wandb", {}).get("name")
    run.names["run_name"] = run.names["run_name"] or (shown_as if isinstance(shown_as, str) else None)
