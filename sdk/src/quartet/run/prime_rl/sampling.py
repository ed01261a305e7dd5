"""How rollouts of a run of prime-rl are sampled. One [sampling] holds for all environments of a run here, and
for its evaluations, but for their temperature.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from quartet.run.dialect import RunDraft, Tables, refuse, shown
from quartet.run.prime_rl.environments import Environment
from quartet.run.prime_rl.given import Given, Said, one_of_all

#: Keys that say the same here.
SAME: Final = {
    "temperature": "temperature",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
#: Where training says nothing.
TEMPERATURE: Final = 1.0
#: Others, by the values that say nothing.
SAYS_NOTHING: Final = {"min_tokens": (0, None), "n": (1, None)}
OF_THE_SERVER: Final = ("return_token_ids", "program_id", "auto_program_id")
_NOTHING: Final = (None, "")
#: Two names of one key.
_LENGTHS: Final = ("max_completion_tokens", "max_tokens")
_TEMPLATE: Final = "chat_template_kwargs"


def trained(given: Given, run: RunDraft, environments: Sequence[Environment]) -> None:
    """[orchestrator.train.sampling]."""
    shared = given.take("orchestrator.train.sampling", "orchestrator.sampling", default={})
    for key, (value, source) in {
        "temperature": (TEMPERATURE, "prime-rl's default of orchestrator.train.sampling.temperature"),
        **read(shared, environments, run),
    }.items():
        if value is not None:
            path = "inference.chat.template_settings" if key == _TEMPLATE else f"sampling.{key}"
            run.put(path, value, source)


def measured(shared: Said, environments: Sequence[Environment], run: RunDraft) -> None:
    """[orchestrator.eval.sampling]. Raises ConfigError for what training does otherwise."""
    chats = run.tables.get("inference", {}).get("chat", {}).get("template_settings")
    same = {**run.tables.get("sampling", {}), **({_TEMPLATE: chats} if chats else {})}
    said = read(shared, environments, run)
    unsaid = {
        key: value
        for key, value in same.items()
        if said.get(key, _NOTHING)[0] is None and (key, value) != ("temperature", TEMPERATURE)
    }
    if unsaid and shared.value:
        run.leave([shown(shared.source, shared.value, _as_in_training(unsaid))])
    elif unsaid:
        run.leave([f"orchestrator.eval without sampling ({_as_in_training(unsaid)})"])
    for key, (value, source) in said.items():
        if key == "temperature" and value is not None:
            run.put("eval.temperature", value, source)
        elif key == _TEMPLATE and (value or {}) != same.get(key, {}):
            refuse(source, value, "chats of evaluations are rendered as those of training; remove it")
        elif value not in (None, {}) and value != same.get(key):
            remedy = (
                "evaluations sample as training does, but for the temperature; remove it, or measure by "
                "quartet evaluate, which has [sampling]"
            )
            refuse(source, value, remedy)


def _as_in_training(unsaid: Tables) -> str:
    """Of what evaluations leave out: there the server's own defaults hold, whatever training says."""
    values = ", ".join(f"{key} = {json.dumps(value, default=str)}" for key, value in unsaid.items())
    return (
        f"evaluations sample as training does where it says nothing: {values}; there as the model itself says"
    )


def read(shared: Said, environments: Sequence[Environment], run: RunDraft) -> dict[str, tuple[object, str]]:
    """By Quartet's names, each value with its place. Raises ConfigError."""
    own = [
        Said(
            _over(_plain(shared), _plain(one.sampling)),
            (one.sampling if one.sampling.value else shared).source,
            True,
        )
        for one in environments
    ]
    chosen = one_of_all("kind of sampling", own) or shared
    table = _plain(chosen)
    body = table.pop("extra_body", None)
    extra = Said({} if body is None else body, f"{chosen.source}.extra_body", True)
    return _translated(table, chosen.source, run) | _translated(extra.table(), extra.source, run)


def _plain(said: Said) -> Tables:
    """Its table, with one of the two names of a length. Raises ConfigError where they differ."""
    table = said.table()
    given = [key for key in _LENGTHS if key in table]
    if len(given) > 1:
        name, other = given
        if table[name] != table[other]:
            remedy = f"{said.source}.{name} says otherwise; keep one of the two"
            refuse(f"{said.source}.{other}", table[other], remedy)
        del table[other]
    return table


def _over(shared: Tables, own: Tables) -> Tables:
    """An environment's own, laid over the one of all."""
    hidden = _LENGTHS if own.keys() & set(_LENGTHS) else ()
    return {**{key: value for key, value in shared.items() if key not in hidden}, **own}


def _translated(table: Tables, source: str, run: RunDraft) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    for key, value in table.items():
        place = f"{source}.{key}"
        if key in SAME:
            # -1 is vLLM's word for all of them.
            found[SAME[key]] = (0 if key == "top_k" and value == -1 else value), place
        elif key == _TEMPLATE:
            found[key] = value, place
        elif key == "temp_scheduler" and value is not None:
            refuse(place, value, "the temperature is one for the whole run; set temperature")
        elif key in OF_THE_SERVER:
            run.leave([shown(place, value, "tokens travel as such")])
        elif value not in SAYS_NOTHING.get(key, (None,)):
            refuse(place, value, "rollouts are not sampled by it here; remove it")
    return found
