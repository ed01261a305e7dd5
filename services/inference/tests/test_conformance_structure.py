"""Every engine: completions of a given form, by models that know nothing of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import openai
import pytest
from quartet.errors import QuartetError
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import rollout_pb2
from quartet_inference.structure.compiling import WALL_SECONDS

from .conformance import Replica
from .engine_calls import caught_midway
from .told import Told, distribution, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: No free strings, which a model that knows no JSON goes on with for ever.
CODE = {"type": "string", "pattern": "^[a-f]{2,4}$"}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": CODE,
        "age": {"type": "integer", "minimum": 7, "maximum": 120},
        "kind": {"enum": ["cat", "dog", 3, None]},
        "at": {
            "type": "object",
            "properties": {
                "x": {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.5},
                "ok": {"type": "boolean"},
            },
            "required": ["x", "ok"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "at", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": CODE},
}  # fmt: skip


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": json.dumps(value)}


def check_person(told: Told) -> dict[str, Any]:
    """Whole, ended by the end token, and all that the schema says."""
    assert told.finish.finish_reason == pb.FINISH_REASON_STOP and told.finish.stop_match == ""
    assert told.tokens[-1] == 258 and 258 not in told.tokens[:-1]
    value: dict[str, Any] = json.loads(told.text)
    assert list(value) == ["name", "age", "kind", "at", "tags"]
    assert all(re.fullmatch("[a-f]{2,4}", one) for one in [value["name"], *value["tags"]])
    assert isinstance(value["age"], int) and 7 <= value["age"] <= 120
    assert value["kind"] in ("cat", "dog", 3, None)
    assert list(value["at"]) == ["x", "ok"] and isinstance(value["at"]["ok"], bool)
    assert value["at"]["x"] in (-1, -0.5, 0, 0.5, 1)
    assert 1 <= len(value["tags"]) <= 3
    return value


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.02},
        {"temperature": 3.0, "top_p": 0.9},
        {"top_k": 1, "seed": 5},
        {"min_p": 0.9, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 1.5},
    ],
    ids=lambda sampling: ",".join(sampling) or "plain",
)
async def test_answers_follow_a_schema_and_tell_the_logprobs_before_it(
    replica: Replica, sampling: dict[str, Any]
) -> None:
    """sampler 1, 3: what is left is drawn, however improbable; what is told is the free distribution."""
    rng = random.Random(31)
    wanted = {"structure": schema(PERSON), "max_tokens": 150, **sampling}
    groups = await asyncio.gather(*[replica.ask(random_prompt(rng, 60), n=2, **wanted) for _ in range(4)])
    answers = [answer for group in groups for answer in group]
    values = [check_person(answer) for answer in answers]
    shaping = {k: v for k, v in sampling.items() if k not in ("top_p", "top_k", "min_p", "seed")}
    # At a temperature of 0.02 the log-probabilities are in thousands.
    tolerance = replica.tolerance * (50 if sampling.get("temperature") == 0.02 else 1)
    assert max(replica.difference(answer, **shaping) for answer in answers) <= tolerance
    if not sampling:
        assert len({json.dumps(value) for value in values}) == len(values)
        assert min(min(answer.logprobs) for answer in answers) < -7, "never against the model's will"


async def test_scores_of_what_was_constrained_are_what_was_told(replica: Replica) -> None:
    answer = await replica.one([5, 6, 7], structure=schema(PERSON), max_tokens=150)
    sample = rollout_pb2.Sample(token_ids=[5, 6, 7, *answer.tokens])
    sample.spans.add(start=3, length=len(answer.tokens))
    scored = await replica.stub.Score(pb.ScoreRequest(samples=[sample]), timeout=60)
    apart = [abs(a - b) for a, b in zip(scored.samples[0].logprobs, answer.logprobs, strict=True)]
    assert max(apart) <= 2 * replica.tolerance


async def test_a_greedy_answer_takes_the_likeliest_token_that_is_allowed(replica: Replica) -> None:
    """A choice of two is made at its first letter."""
    model = replica.models[max(replica.models)]
    rng, picked = random.Random(9), set()
    for _ in range(12):
        prompt = random_prompt(rng, 30)
        answer = await replica.one(prompt, structure={"regex": "yes|no"}, temperature=0)
        row = distribution(model, prompt, answer.tokens[:1])[0]
        letters = {"yes": row[ord("y") - 33].item(), "no": row[ord("n") - 33].item()}
        assert answer.text == max(letters, key=lambda word: letters[word])
        picked.add(answer.text)
    assert picked == {"yes", "no"}


async def test_draws_among_what_is_allowed_follow_the_model(replica: Replica) -> None:
    model, prompt = replica.models[max(replica.models)], list(range(20))
    groups = await asyncio.gather(
        *[
            replica.ask(prompt, n=128, max_tokens=1, seed=seed, structure={"regex": "[a-h]"})
            for seed in range(8)
        ]
    )
    drawn = [chr(told.tokens[0] + 33) for group in groups for told in group]
    row = distribution(model, prompt, [0])[0].double()
    shares = {letter: row[ord(letter) - 33].exp().item() for letter in "abcdefgh"}
    total = sum(shares.values())
    assert set(drawn) <= set(shares)
    for letter, share in shares.items():
        chance = share / total
        assert abs(drawn.count(letter) - len(drawn) * chance) < 4.5 * (len(drawn) * chance) ** 0.5 + 1


#: None is longer than the tokens that it may take, whatever the weights that were served before.
FORMS = [
    ({"regex": "(ab|cd){3}-[0-9]{2}"}, "(ab|cd){3}-[0-9]{2}"),
    ({"grammar": 'start: "<" word ("," word)? ">"\nword: "on" | "off"'}, "<(on|off)(,(on|off))?>"),
    ({"grammar": 'start: "é" | "日本"'}, "é|日本"),
    (schema({"enum": ["a", "b"]}), '"[ab]"'),
    (schema({"type": "integer", "minimum": -3, "maximum": 12}), "-?[0-9]{1,2}"),
    (schema({"anyOf": [{"type": "null"}, {"type": "boolean"}]}), "null|true|false"),
    ({"regex": "(x|yz){0,12}", "from_first_token": True}, "(x|yz){0,12}"),
]


async def test_forms_and_free_rows_decode_side_by_side(replica: Replica) -> None:
    """With seeds each is what it is alone: no row changes another."""
    rng = random.Random(12)
    asked = [
        (random_prompt(rng, 40), {"structure": form, "seed": seed, "max_tokens": 40}, wanted)
        for seed, (form, wanted) in enumerate(FORMS * 2)
    ]
    free = [
        (random_prompt(rng, 40), {"seed": 90 + i, "max_tokens": 40, "ignore_eos": True}) for i in range(4)
    ]
    calls = [replica.ask(prompt, n=2, **sampling) for prompt, sampling, _ in asked]
    together = await asyncio.gather(
        *calls, *[replica.ask(prompt, n=2, **sampling) for prompt, sampling in free]
    )
    for (prompt, sampling, wanted), group in zip(asked, together, strict=False):
        for told in group:
            assert told.finish.finish_reason == pb.FINISH_REASON_STOP and re.fullmatch(wanted, told.text), (
                told.text
            )
        alone = await replica.ask(prompt, n=2, **sampling)
        assert [told.tokens for told in alone] == [told.tokens for told in group]
    for (prompt, sampling), group in zip(free, together[len(asked) :], strict=True):
        assert all(len(told.tokens) == 40 for told in group)
        alone = await replica.ask(prompt, n=2, **sampling)
        assert [told.tokens for told in alone] == [told.tokens for told in group]


@pytest.mark.parametrize(
    "sampling", [{"seed": 4}, {"temperature": 0.0}, {"seed": 6, "presence_penalty": 1.0}]
)
async def test_a_structured_completion_goes_on_elsewhere(replica: Replica, sampling: dict[str, Any]) -> None:
    wanted = {"structure": schema(PERSON), "max_tokens": 150, **sampling}
    prompt = [9, 8, 7]
    whole = await replica.one(prompt, **wanted)
    check_person(whole)
    for done in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        rest = await replica.one(prompt + whole.tokens[:done], resumed=done, **wanted)
        assert rest.tokens == whole.tokens[done:] and rest.text == whole.text
    with pytest.raises(QuartetError) as refused:
        await replica.one([*prompt, 65, 66], resumed=2, **wanted)
    assert refused.value.metadata["field"] == "resumed_tokens"


async def test_a_completion_that_was_ended_before_its_form_goes_on_nowhere(replica: Replica) -> None:
    """following.py 4: it is no answer of that form, and none is made of it."""
    wanted, prompt = {"structure": {"regex": "ab[cd]{2}"}, "max_tokens": 20, "seed": 3}, [9, 8, 7]
    whole = await replica.one(prompt, **wanted)
    assert whole.tokens[-1] == 258
    ended = await replica.one(prompt + whole.tokens, resumed=len(whole.tokens), **wanted)
    assert ended.tokens == [] and ended.text == whole.text, "whole: it has ended"
    early = [*whole.tokens[:3], 258]
    with pytest.raises(QuartetError) as refused:
        await replica.one(prompt + early, resumed=len(early), **wanted)
    assert refused.value.reason == "INVALID_REQUEST"
    assert refused.value.metadata["field"] == "resumed_tokens"
    stopped = {**wanted, "stop": ["b"]}
    cut = await replica.one(prompt + whole.tokens[:2], resumed=2, **stopped)
    assert cut.tokens == [] and cut.finish.stop_match == "b", "a stop ends a beginning"


async def test_what_ends_early_is_a_beginning(replica: Replica) -> None:
    cut = await replica.one([1, 2], structure=schema(PERSON), max_tokens=12, seed=1)
    assert cut.finish.finish_reason == pb.FINISH_REASON_LENGTH and cut.text.startswith('{"name":')
    stopped = await replica.one([1, 2], structure=schema(PERSON), max_tokens=150, stop=['"age"'])
    assert stopped.finish.stop_match == '"age"' and re.fullmatch('{"name": ?"[a-f]{2,4}", ?', stopped.text)


async def test_an_update_in_flight_leaves_the_form(replica: Replica) -> None:
    form = {"regex": "([a-f]{3};){50}"}

    def begin() -> list[asyncio.Task[Told]]:
        wanted = {"structure": form, "max_tokens": 220}
        return [asyncio.create_task(replica.one([first], **wanted)) for first in range(12)]

    calls = await caught_midway(replica.door.engine, begin, completions=12, tokens=200)
    await replica.serve(7)
    await replica.door.engine.resume()
    answers = await asyncio.gather(*calls)
    assert any(len(set(told.versions)) > 1 for told in answers), "no request was in flight at the update"
    assert all(re.fullmatch(form["regex"], told.text) for told in answers)
    assert max(replica.difference(told) for told in answers) <= replica.tolerance


REFUSED = [
    ({"structure": {"json_schema": "{"}}, "structure.json_schema", "JSON Schema"),
    ({"structure": {"json_schema": "[]"}}, "structure.json_schema", "JSON Schema"),
    ({"structure": schema({"type": "objct"})}, "structure.json_schema", "objct"),
    ({"structure": schema({"type": "array", "uniqueItems": True})}, "structure.json_schema", "uniqueItems"),
    ({"structure": schema({"$ref": "http://127.0.0.1:1/schema"})}, "structure.json_schema", "retriev"),
    ({"structure": schema({"$ref": "file:///etc/passwd"})}, "structure.json_schema", "retriev"),
    ({"structure": schema({"allOf": [{"type": "string"}, {"type": "null"}]})}, "structure.json_schema",
     "nsatisf"),
    ({"structure": {"regex": "a(b"}}, "structure.regex", "unclosed group"),
    ({"structure": {"grammar": "start: foo"}}, "structure.grammar", "foo"),
    ({"structure": {"grammar": "start: " + "a" * 131_072}}, "structure.grammar", "131072"),
    ({"structure": {}}, "structure", "one form"),
    ({"structure": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "end token"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "field", "why"), REFUSED, ids=range(len(REFUSED)))
async def test_what_cannot_be_enforced_is_refused_with_the_reason(
    replica: Replica, wanted: dict[str, Any], field: str, why: str
) -> None:
    sampled = (await replica.info()).tokens_sampled
    with pytest.raises(QuartetError) as refused:
        await replica.one([1, 2], **wanted)
    assert refused.value.reason == "INVALID_REQUEST" and refused.value.metadata["field"] == field
    assert why in refused.value.message
    assert (await replica.info()).tokens_sampled == sampled


NESTED = '{"type":"array","items":' * 2000 + "{}" + "}" * 2000
CYCLE = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
WIDE = {
    "type": "object",
    "properties": {f"p{i}": {"enum": [f"v{i}_{j}" for j in range(60)]} for i in range(160)},
}
CHAIN = {  # by names, where brackets would be counted
    "$ref": "#/$defs/n0",
    "$defs": {
        f"n{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/n{i + 1}"}}} for i in range(1600)
    }
    | {"n1600": {"type": "integer"}},
}
SLOW = {"type": "integer", "multipleOf": 10_000_019}
EXPLODING = ["(.*a){40}b", "((a{1,99}){1,99}){1,99}", "(a|b|c|d)*a(a|b|c|d){400}", "(?i)" + "(aé|ß)*" * 400]


@pytest.mark.parametrize(
    "structure",
    [
        {"json_schema": NESTED},
        *map(schema, (CYCLE, WIDE, CHAIN, SLOW)),
        *({"regex": one} for one in EXPLODING),
    ],
    ids=["nested", "cycle", "wide", "chain", "slow", *map(str, range(len(EXPLODING)))],
)
async def test_hostile_structures_are_bounded(replica: Replica, structure: dict[str, Any]) -> None:
    """Refused or followed as far as it goes, soon; and the next request is answered."""
    began = time.monotonic()
    beside = asyncio.create_task(replica.one([4, 4], max_tokens=20, ignore_eos=True))
    try:
        told = await replica.one([1], structure=structure, max_tokens=40)
        assert told.tokens
    except QuartetError as error:
        assert error.reason == "INVALID_REQUEST", error
    assert len((await beside).tokens) == 20
    assert time.monotonic() - began < 2 * WALL_SECONDS


STUCK = [
    {"grammar": 'start: "ab" X\nX: /[bc]d/ & /[ef]g/'},  # nothing is in both
    {"grammar": "start: s\ns: s s | s s s | s s s s | s s s s s | L\nL: /[ -~]/"},
]


@pytest.mark.parametrize(
    # An ambiguous one takes seconds of a processor until it is stuck.
    ("structure", "completions"), list(zip(STUCK, (4, 1), strict=True)), ids=["dead end", "ambiguous"]
)  # fmt: skip
async def test_a_completion_that_cannot_go_on_fails_alone(
    replica: Replica, structure: dict[str, Any], completions: int
) -> None:
    """sampler.py 6: said so, and no sign of broken weights."""
    rng = random.Random(3)
    free = [asyncio.create_task(replica.one(random_prompt(rng), ignore_eos=True)) for _ in range(4)]
    # So that few are ended by the end token before that.
    wanted = {"max_tokens": 200, "temperature": 100.0, "structure": structure}
    with pytest.raises(QuartetError) as failed:
        await asyncio.gather(*[replica.one([1, seed], seed=seed, **wanted) for seed in range(completions)])
    assert failed.value.reason == "INVALID_REQUEST" and failed.value.metadata["field"] == "structure"
    assert all(len(told.tokens) == 24 for told in await asyncio.gather(*free))
    assert not (await replica.info()).out_of_service


async def test_the_front_says_of_which_form_it_was(replica: Replica) -> None:
    """openai/forms.py 3: of a stream, too."""
    extra = {"guided_grammar": STUCK[0]["grammar"]}
    asked: dict[str, Any] = {"max_tokens": 200, "temperature": 100, "n": 4, "seed": 1, "extra_body": extra}
    with pytest.raises(openai.BadRequestError, match="too complex"):
        await replica.door.complete(**asked, logprobs=3)
    with pytest.raises(openai.APIError, match="guided_grammar"):
        async for _ in await replica.door.complete(**asked, stream=True):
            pass


async def test_alternatives_are_those_before_the_form(replica: Replica) -> None:
    model, prompt = replica.models[max(replica.models)], [4, 5, 6]
    extra = {"guided_regex": "[xy]{5}", "return_tokens_as_token_ids": True, "return_token_ids": True}
    asked = {"prompt": prompt, "logprobs": 4, "max_tokens": 20, "extra_body": extra}
    (choice,) = (await replica.door.complete(**asked)).choices
    assert re.fullmatch("[xy]{5}", choice.text)
    rows = distribution(model, prompt, choice.token_ids)
    outside = 0
    for row, told, token in zip(rows, choice.logprobs.top_logprobs, choice.token_ids, strict=True):
        values = sorted(told.values(), reverse=True)
        assert values[:4] == pytest.approx(row.topk(4).values.tolist(), abs=replica.tolerance)
        outside += f"token_id:{token}" not in list(told)[:4] or len(told) > 4
    assert outside, "all that was sampled was among the likeliest: nothing was restricted"
