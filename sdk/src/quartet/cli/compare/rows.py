"""The rows of a comparison: what differs between runs, what they came to, and what it took.

1. A value that a folder does not have is None: nothing is guessed, and 0 is a 0.
2. Rewards stand beside each other at equal steps: after a quarter, half, three quarters and all of the steps
   that every run has, each the mean of up to WINDOW steps up to there, because that of one batch is noise.
3. Of evaluations those stand there that several runs had at one step, MAX_EVALUATIONS at most, evenly spread;
   where a run is shorter, its place is empty.
4. Where a run has several environments, each one's rewards stand below those of all; and where agents are
   rewarded apart, what each role earned: the sides of a game may earn nothing together, whoever wins.
5. What stands in a table that is switched off is no setting. What one run says and another leaves out
   differs where it is not the default (run/written_out.py; of services service_defaults.py), and a preset
   where its values do.
6. Where rollouts of an evaluation failed, its coverage stands below its reward. The best is looked for among
   those that lack a tenth at most, where there are such (best.py 4).
7. Runs that are evaluated on different environments are not measured alike, nor is the training of those that
   replace other groups: a sentence says so (`remarks`).
8. Pure: what is computed here is only of what the folders say (folders.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quartet.cli.best import LEAST_COVERAGE, coverage_of
from quartet.cli.compare.folders import PRESET, Recorded
from quartet.cli.compare.service_defaults import service_defaults
from quartet.cli.measured_lines import Row
from quartet.cli.told_apart import agents as agents_of
from quartet.cli.told_apart import environments as environments_of
from quartet.local.wiring import SERVICES

SETTINGS: Final = "settings that differ"
OF_PRESETS: Final = "algorithm."
#: Settings by which groups are kept from training for what they earned.
REPLACING: Final = ("algorithm.dynamic_sampling", "difficulty_filter.")
APART: Final = "rewards of each environment"
OF_AGENTS: Final = "rewards of each agent"
WINDOW: Final = 10
#: Of the steps that all have.
QUARTERS: Final = 4
MAX_EVALUATIONS: Final = 8
REWARD: Final = "train/reward"
EVALUATED: Final = "eval/reward"


@dataclass(frozen=True)
class Line:
    """A row of the comparison: a value for each run."""

    section: str
    name: str
    values: Sequence[Any]


def lines(runs: Sequence[Recorded]) -> list[Line]:
    """All of them, in the order in which they are read."""
    return [
        *_settings(runs),
        *_rewards(runs),
        *_rewards_apart(runs),
        *_rewards_of_agents(runs),
        *_evaluations(runs),
        *_costs(runs),
        *_environments(runs),
    ]


def remarks(runs: Sequence[Recorded]) -> list[str]:
    """What whoever reads the rows should know, a sentence each."""
    told = []
    measured_on = {run.measured_on for run in runs if run.measured_on and run.evaluations}
    if len(measured_on) > 1:
        told.append(
            "the runs are evaluated on different environments (eval.env, or env where there is none): their "
            "rewards before and after, and those of evaluations, are not of the same tasks"
        )
    trained = [run for run in runs if run.steps]
    if any(line.name.startswith(REPLACING) for line in _settings(trained)):
        told.append(
            "the runs do not replace the same groups (algorithm.dynamic_sampling, difficulty_filter): their "
            "rewards of training are of the groups that each kept; rollout/reward of metrics.jsonl, where a "
            "run has it, is of all"
        )
    return told


def _settings(runs: Sequence[Recorded]) -> Iterator[Line]:
    told = [run.written_out for run in runs]
    if any(one is None and run.settings is not None for one, run in zip(told, runs, strict=True)):
        told = [run.settings for run in runs]  # one of another release can only be taken as it is written
    differing = {key: values for key in _keys(told) if (values := _differing(told, key)) is not None}
    if not any(key.startswith(OF_PRESETS) for key in differing.keys() - {PRESET}):
        differing.pop(PRESET, None)
    for key, values in differing.items():
        yield Line(SETTINGS, key, values)


def _keys(told: Sequence[Row | None]) -> list[str]:
    return sorted({key for settings in told for key in settings or ()})


def _differing(told: Sequence[Row | None], key: str) -> list[Any] | None:
    """The values of a key; None where no two runs that read it differ."""
    read = [settings is not None and not _is_off(settings, key) for settings in told]
    said = [settings is not None and key in settings for settings in told]
    service, _, own = key.partition(".")
    asked = service in SERVICES and any(reads and not says for reads, says in zip(read, said, strict=True))
    default = service_defaults(service).get(own) if asked else None
    values = [
        (settings or {}).get(key, default) if reads else None
        for settings, reads in zip(told, read, strict=True)
    ]
    differing = [value for value, reads in zip(values, read, strict=True) if reads]
    return values if any(value != differing[0] for value in differing) else None


def _is_off(settings: Row, key: str) -> bool:
    """Whether it stands in a table that says so."""
    parts = key.split(".")
    switches = (".".join((*parts[:end], "enabled")) for end in range(1, len(parts)))
    return any(switch != key and settings.get(switch) is False for switch in switches)


def _rewards(runs: Sequence[Recorded]) -> Iterator[Line]:
    yield Line("rewards", "stands", [run.stands for run in runs])
    yield Line("rewards", "steps", [run.last_step for run in runs])
    yield Line("rewards", "reward before", [_before(run) for run in runs])
    began, ended = _evaluated_first(runs), _evaluated_last(runs)
    yield from _coverage("rewards", "reward before", began)
    yield Line("rewards", "reward after", [run.end.get("reward_after") for run in runs])
    yield from _coverage("rewards", "reward after", ended)
    common = min(run.last_step for run in runs)
    for step in sorted({common * part // QUARTERS for part in range(1, QUARTERS + 1)} - {0}):
        values = [_window(run, step) for run in runs]
        yield Line("rewards", f"training, step {step} (mean of {min(WINDOW, step)})", values)
    ends = [_window(run, run.last_step) for run in runs]
    yield Line("rewards", f"training, last steps (mean of up to {WINDOW})", ends)
    yield Line("rewards", "best evaluation", [_best_evaluation(run) for run in runs])
    yield Line("rewards", "best step", [_best(run.steps, REWARD) for run in runs])


def _evaluated_first(runs: Sequence[Recorded]) -> list[Row]:
    return [run.evaluations.get(0, {}) for run in runs]


def _evaluated_last(runs: Sequence[Recorded]) -> list[Row]:
    """After the last step of a run that has ended."""
    return [run.evaluations.get(run.last_step, {}) if run.end else {} for run in runs]


def _rewards_apart(runs: Sequence[Recorded]) -> Iterator[Line]:
    for name in _apart("env", [run.steps for run in runs]):
        yield from _trained(runs, APART, name, f"env/{name}/reward")


def _rewards_of_agents(runs: Sequence[Recorded]) -> Iterator[Line]:
    for name, figure in _agents("eval", [run.evaluations for run in runs]).items():
        for when, rows in (("before", _evaluated_first(runs)), ("after", _evaluated_last(runs))):
            yield Line(OF_AGENTS, f"{name}, reward {when}", [row.get(figure) for row in rows])
    for name, figure in _agents("env", [run.steps for run in runs]).items():
        yield from _trained(runs, OF_AGENTS, name, figure)


def _trained(runs: Sequence[Recorded], section: str, name: str, figure: str) -> Iterator[Line]:
    """What training earned of one figure, at the last step that all have and at the end of each."""
    common = min(run.last_step for run in runs)
    if common:
        values = [_window(run, common, figure) for run in runs]
        yield Line(section, f"{name}, step {common} (mean of {min(WINDOW, common)})", values)
    ends = [_window(run, run.last_step, figure) for run in runs]
    yield Line(section, f"{name}, last steps (mean of up to {WINDOW})", ends)


def _apart(kind: str, runs: Sequence[dict[int, Row]]) -> list[str]:
    """The environments of all the runs, where one of these has several."""
    names = [environments_of(kind, (name for row in rows.values() for name in row)) for rows in runs]
    return sorted(set().union(*names)) if any(len(one) > 1 for one in names) else []


def _agents(kind: str, runs: Sequence[dict[int, Row]]) -> dict[str, str]:
    """The figure of each role, where agents are rewarded apart; named with its environment, where there are
    several."""
    figures = {name: value for rows in runs for row in rows.values() for name, value in row.items()}
    names = sorted(environments_of(kind, figures))
    return {
        role if len(names) == 1 else f"{name} {role}": f"{kind}/{name}/agents/{role}/reward"
        for name in names
        for role in agents_of(kind, name, figures)
    }


def _before(run: Recorded) -> Any:
    return run.summary.get("reward_before", run.evaluations.get(0, {}).get(EVALUATED))


def _window(run: Recorded, step: int, name: str = REWARD) -> float | None:
    """The mean training reward of the steps up to one."""
    window = [run.steps.get(at, {}).get(name) for at in range(max(1, step - WINDOW + 1), step + 1)]
    return _mean([value for value in window if value is not None])


def _best(rows: dict[int, Row], name: str) -> dict[str, Any] | None:
    found = [(row[name], -step) for step, row in rows.items() if row.get(name) is not None]
    if not found:
        return None
    value, step = max(found)  # the first of equal ones
    return {"reward": value, "step": -step}


def _best_evaluation(run: Recorded) -> dict[str, Any] | None:
    covered = {step: coverage_of(row, EVALUATED) for step, row in run.evaluations.items()}
    whole = {step: row for step, row in run.evaluations.items() if covered[step] >= LEAST_COVERAGE}
    best = _best(whole, EVALUATED) or _best(run.evaluations, EVALUATED)
    return best and (best | {"coverage": covered[best["step"]]} if covered[best["step"]] < 1 else best)


def _coverage(section: str, name: str, rows: Sequence[Row], prefix: str = "eval") -> Iterator[Line]:
    """What part of its rollouts each evaluation has, where one has not all."""
    values = [row.get(f"{prefix}/coverage") for row in rows]
    if any(value is not None and value < 1 for value in values):
        yield Line(section, f"{name}, coverage", values)


def _evaluations(runs: Sequence[Recorded]) -> Iterator[Line]:
    had = [step for run in runs for step in run.evaluations]
    shared = sorted({step for step in had if had.count(step) > 1})
    if len(shared) > MAX_EVALUATIONS:
        apart = (len(shared) - 1) / (MAX_EVALUATIONS - 1)
        shared = [shared[round(at * apart)] for at in range(MAX_EVALUATIONS)]
    measured = [run.evaluations for run in runs]
    names, roles = _apart("eval", measured), _agents("eval", measured)
    for step in shared:
        rows = [run.evaluations.get(step, {}) for run in runs]
        yield Line("evaluations", f"after step {step}", [row.get(EVALUATED) for row in rows])
        yield from _coverage("evaluations", f"after step {step}", rows)
        for name in names:
            values = [row.get(f"eval/{name}/reward") for row in rows]
            yield Line("evaluations", f"after step {step}, {name}", values)
            yield from _coverage("evaluations", f"after step {step}, {name}", rows, f"eval/{name}")
        for role, figure in roles.items():
            yield Line("evaluations", f"after step {step}, {role}", [row.get(figure) for row in rows])


def _costs(runs: Sequence[Recorded]) -> Iterator[Line]:
    def each(name: str, value: Callable[[Recorded], Any]) -> Line:
        return Line("what it took", name, [value(run) for run in runs])

    yield each("seconds, all of it", lambda run: run.end.get("wall_seconds"))
    yield each("seconds of a step", lambda run: _mean(_told(run, "time/step_s")))
    yield each("of which waiting for rollouts", lambda run: _mean(_told(run, "time/wait_rollouts_s")))
    yield each("tokens per second", _rate)
    yield each("tokens of a rollout", lambda run: _mean(_told(run, "rollout/mean_length")))
    yield each("staleness, mean", lambda run: _mean(_told(run, "staleness/mean")))
    yield each("staleness, most", lambda run: max(_told(run, "staleness/max"), default=None))
    yield each("rollouts", lambda run: _last(run).get("ledger/dispatched"))
    yield each("discarded", lambda run: _last(run).get("ledger/discarded"))


def _told(run: Recorded, name: str) -> list[float]:
    return [row[name] for row in run.steps.values() if row.get(name) is not None]


def _rate(run: Recorded) -> float | None:
    """Over the time of all steps; the mean of their rates would count a short step as much as a long one."""
    names = ("tokens_per_second", "time/step_s")
    told = [
        (row[names[0]], row[names[1]]) for row in run.steps.values() if all(name in row for name in names)
    ]
    seconds = sum(step_s for _, step_s in told)
    return sum(rate * step_s for rate, step_s in told) / seconds if seconds else None


def _last(run: Recorded) -> Row:
    return run.steps[run.last_step] if run.steps else {}


def _environments(runs: Sequence[Recorded]) -> Iterator[Line]:
    told = [{one["name"]: one for one in run.end.get("environments", ())} for run in runs]
    for name in sorted({name for environments in told for name in environments}):
        values = [environments.get(name) for environments in told]
        for key in ("version", "digest"):
            histories = [value and _history(value, key) for value in values]
            if any(histories):
                yield Line("environments", f"{name}, {key}", histories)


def _history(environment: Row, key: str) -> str | None:
    """What it was; of digests, also what it became."""
    later = environment.get("later_digests", ()) if key == "digest" else ()
    return " -> ".join(map(str, [environment[key], *later])) if environment.get(key) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
