"""How rollouts of a run of prime-rl are sampled, and those of its evaluations.

1. What all environments have in common is [sampling], or [eval.sampling]; what one of them has of its own
   stands in its table. The temperature of training is one for all of them.
2. An answer to an evaluation that says nothing of its length ends where the context does, whatever training
   says. What else it leaves out is as training has it, which is told.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Final

from quartet.run.dialect import RunDraft, Tables, refuse, shown
from quartet.run.prime_rl.environments import Environment
from quartet.run.prime_rl.given import LIKENESS, Given, Said, one_of_all

#: Keys that say the same here.
SAME: Final = {
    "temperature": "temperature",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "chat_template_kwargs": "template_settings",
}
#: Where training says nothing.
TEMPERATURE: Final = 1.0
#: Keys that leave sampling as it is without them.
_AS_WITHOUT: Final = (("temperature", TEMPERATURE), ("min_tokens", 0))
#: More tokens than any context has.
WHOLE_CONTEXT: Final = 1_000_000
#: Others, by the values that say nothing.
SAYS_NOTHING: Final = {"n": (1, None)}
OF_THE_SERVER: Final = ("return_token_ids", "program_id", "auto_program_id")
_NOTHING: Final = (None, "")
#: Two names of one key.
_LENGTHS: Final = ("max_completion_tokens", "max_tokens")
_SETTINGS: Final = "template_settings"

#: By Quartet's names, each value with its place.
Found = dict[str, tuple[object, str]]


def trained(given: Given, run: RunDraft, environments: Sequence[Environment]) -> None:
    """[orchestrator.train.sampling], and what environments say beside it. Raises ConfigError."""
    said = given.take("orchestrator.train.sampling", "orchestrator.sampling", default={})
    shared, each = _read(said, environments, run)
    default = TEMPERATURE, "prime-rl's default of orchestrator.train.sampling.temperature"
    for found in (shared, *each):
        if _value(found, "temperature") is None:
            found["temperature"] = default
    one_of_all("temperature", [Said(*found["temperature"], True) for found in each])
    _lay_out(run, "sampling", environments, shared, each)


def measured(said: Said, environments: Sequence[Environment], run: RunDraft) -> None:
    """[orchestrator.eval.sampling], and what its environments say beside it. Raises ConfigError."""
    training = run.tables.get("sampling", {})
    shared, each = _read(said, environments, run)
    for found in (shared, *each):
        if "max_tokens" in training and _value(found, "max_tokens") is None:
            default = "prime-rl's default of orchestrator.eval.sampling.max_completion_tokens"
            found["max_tokens"] = WHOLE_CONTEXT, default
        _check_settings(training.get(_SETTINGS), found)
    unsaid = {
        key: value
        for key, value in training.items()
        if any(_value(found, key) is None for found in each) and (key, value) not in _AS_WITHOUT
    }
    if unsaid and said.value:
        run.leave([shown(said.source, said.value, _as_in_training(unsaid))])
    elif unsaid:
        run.leave([f"orchestrator.eval without sampling ({_as_in_training(unsaid)})"])
    _lay_out(run, "eval.sampling", environments, shared, each)


def longest_of_evaluations(run: RunDraft) -> Said | None:
    """The longest answer to an evaluation that the file asks for; None where it asks for none."""
    table = run.tables.get("eval", {})
    listed = enumerate(table.get("env", ()))
    places = {("eval", "sampling"): table.get("sampling", {})} | {
        ("eval", "env", str(number), "sampling"): one.get("sampling", {}) for number, one in listed
    }
    asked = [
        Said(most, run.origins[*place, "max_tokens"], True)
        for place, sampled in places.items()
        if type(most := sampled.get("max_tokens")) is int and most != WHOLE_CONTEXT
    ]
    return max(asked, key=lambda said: int(said.value), default=None)


def bounds_training(run: RunDraft) -> bool:
    """Whether an answer in training ends somewhere before the context does."""
    shared = run.tables.get("sampling", {}).get("max_tokens")
    own = [one.get("sampling", {}).get("max_tokens", shared) for one in run.tables.get("env", ())]
    return all(most not in (None, WHOLE_CONTEXT) for most in own)


def _as_in_training(unsaid: Tables) -> str:
    """Of what evaluations leave out: there the server's own defaults hold, whatever training says."""
    values = ", ".join(f"{key} = {json.dumps(value, default=str)}" for key, value in unsaid.items())
    return (
        f"evaluations sample as training does where it says nothing: {values}; there as the model itself says"
    )


def _lay_out(
    run: RunDraft, place: str, environments: Sequence[Environment], shared: Found, each: Sequence[Found]
) -> None:
    """What all have in common goes into the table of all, what one has of its own into its own. Raises
    ConfigError."""
    listed = (place.removesuffix("sampling") + "env").split(".")
    for key in dict.fromkeys(key for found in (shared, *each) for key in found):
        values = [found.get(key, _NOTHING) for found in each]
        agreed = bool(values) and all(value == values[0][0] for value, _ in values)
        common, source = values[0] if agreed else shared.get(key, _NOTHING)
        if common is not None:
            run.put(f"{place}.{key}", common, source)
        for number, (value, own_source) in enumerate(values):
            if value == common:
                continue
            if value is None and key != "max_tokens":
                remedy = f"where an environment says nothing, {source} = {json.dumps(common)} holds"
                own_source = own_source or f"{environments[number].sampling.source}.{key}"
                refuse(own_source, value, f"{remedy}; give it a value")
            if key == _SETTINGS:
                _check_settings(common, each[number])
            own = environments[number].table.setdefault("sampling", {})
            own[key] = WHOLE_CONTEXT if value is None else value
            run.origins[*listed, str(number), "sampling", key] = own_source


def _check_settings(around: object, found: Found) -> None:
    """Raises ConfigError where a template would get settings of a table around its own, too."""
    own, source = found.get(_SETTINGS, _NOTHING)
    if isinstance(around, dict) and isinstance(own, dict) and (more := sorted(around.keys() - own.keys())):
        refuse(source, own, f"settings of a chat template add up here; say {more[0]} in it, too")


def _read(shared: Said, environments: Sequence[Environment], run: RunDraft) -> tuple[Found, list[Found]]:
    """What is said for all, and what holds for each environment. Raises ConfigError."""
    return _found(shared, run), [
        # An extra_body of its own is in the place of the one of all.
        _found(shared, run, without="extra_body" if "extra_body" in one.sampling.table() else "")
        | _found(one.sampling, run)
        for one in environments
    ]


def _found(said: Said, run: RunDraft, without: str = "") -> Found:
    """By Quartet's names. Raises ConfigError."""
    table = _plain(said)
    table.pop(without, None)
    body = table.pop("extra_body", None)
    extra = Said({} if body is None else body, f"{said.source}.extra_body", True)
    return _translated(table, said.source, run) | _translated(extra.table(), extra.source, run)


def _value(found: Found, key: str) -> object:
    return found.get(key, _NOTHING)[0]


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


def _translated(table: Tables, source: str, run: RunDraft) -> Found:
    found: Found = {}
    for key, value in table.items():
        place = f"{source}.{key}"
        if key in SAME:
            # -1 is vLLM's word for all of them.
            value = 0 if key == "top_k" and value == -1 else value
            value = [value] if key == "stop" and isinstance(value, str) else value
            found[SAME[key]] = (None if value == {} else value), place
        elif key == "temp_scheduler" and value is not None:
            refuse(place, value, "the temperature is one for the whole run; set temperature")
        elif key in OF_THE_SERVER:
            run.leave([shown(place, value, "tokens travel as such")])
        elif value not in SAYS_NOTHING.get(key, (None,)):
            close = difflib.get_close_matches(key, SAME, n=1, cutoff=LIKENESS)
            close_to = f"did you mean {close[0]!r}?" if close else "remove it"
            refuse(place, value, f"rollouts are not sampled by it here; {close_to}")
    return found
