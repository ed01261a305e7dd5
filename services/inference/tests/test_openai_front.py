"""The OpenAI-compatible front, by the real client of that API: what it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from quartet_inference.engine import Delta, Finish, Reason, Request, ServedWeights, Span

from .openai_door import TOOL, Door, opened, requests_seen, say
from .random_models import byte_tokenizer, qwen3

SEEDED: dict[str, Any] = {"seed": 7, "max_tokens": 40, "temperature": 1.0}


async def test_chat_whole_and_streamed_are_equal(door: Door) -> None:
    whole = await door.chat(**SEEDED, n=3, logprobs=True, extra_body={"return_token_ids": True})
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.system_fingerprint == f"{door.model}@0"
    usage = whole.usage
    assert usage.completion_tokens == sum(len(c.token_ids) for c in whole.choices)
    assert usage.prompt_tokens == len(whole.prompt_token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    for choice in whole.choices:
        assert len(choice.logprobs.content) == len(choice.token_ids)
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
        assert choice.policy_versions == [{"start": 0, "length": len(choice.token_ids), "policy_version": 0}]
        assert (choice.finish_reason == "stop") == (choice.token_ids[-1] == 258)

    stream = await door.chat(
        **SEEDED,
        n=3,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"return_token_ids": True},
    )
    text, ids, ends, logprobs = ["", "", ""], [[], [], []], {}, [[], [], []]  # type: ignore[var-annotated]
    last = None
    async for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            piece = getattr(choice, "token_ids", None) or []
            assert len(piece) <= 1, "each is told as it is sampled"
            told = len(ids[choice.index]) + len(piece)
            so_far = (usage.prompt_tokens, told, usage.prompt_tokens + told)
            assert so_far == (
                chunk.usage.prompt_tokens,
                chunk.usage.completion_tokens,
                chunk.usage.total_tokens,
            )
            text[choice.index] += choice.delta.content or ""
            ids[choice.index] += piece
            if choice.logprobs:
                logprobs[choice.index] += [entry.logprob for entry in choice.logprobs.content]
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert last is not None and last.choices == []
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (usage.prompt_tokens, usage.total_tokens)
    assert last.usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens_details.cached_tokens
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        assert ids[choice.index] == choice.token_ids
        assert logprobs[choice.index] == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-6)
        assert ends[choice.index] == choice.finish_reason


async def test_completions_of_texts_and_tokens(door: Door) -> None:
    by_text = await door.complete(**SEEDED, logprobs=0, extra_body={"return_token_ids": True})
    (choice,) = by_text.choices
    assert choice.prompt_token_ids == [71, 72] or len(choice.prompt_token_ids) == 2
    by_tokens = await door.complete(**{**SEEDED, "prompt": choice.prompt_token_ids})
    assert by_tokens.choices[0].text == choice.text and choice.text
    assert "".join(choice.logprobs.tokens).replace("<|im_end|>", "").startswith(choice.text[:3])
    assert len(choice.logprobs.token_logprobs) == len(choice.token_ids)

    both = await door.complete(**{**SEEDED, "prompt": ["hi", "ho"]}, n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == choice.text and both.usage.prompt_tokens == 4
    streamed = await door.complete(**{**SEEDED, "prompt": ["hi", "ho"]}, n=2, stream=True)
    text = [""] * 4
    async for chunk in streamed:
        for piece in chunk.choices:
            text[piece.index] += piece.text
    assert text == [c.text for c in both.choices]
    assert (await door.complete()).usage.completion_tokens <= 16, "the documented default"


async def test_stop_penalties_and_extras(door: Door) -> None:
    plain = await door.complete(**SEEDED, extra_body={"ignore_eos": True, "return_token_ids": True})
    text = plain.choices[0].text
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    for stream in (False, True):
        answer = await door.complete(
            **SEEDED, stop=[stop, "never"], stream=stream, extra_body={"ignore_eos": True}
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        told = "".join(c.choices[0].text for c in chunks if c.choices)
        assert told == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == stop
    greedy = [
        (await door.complete(temperature=0, max_tokens=20, extra_body=extra)).choices[0].text
        for extra in ({}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": -1}, {"repetition_penalty": 1.0})
    ]
    assert len(set(greedy)) == 1
    assert (await door.complete(**SEEDED, extra_body={"top_k": 1})).choices[0].text[:5] == greedy[0][:5]
    penalised = await door.complete(temperature=0, max_tokens=20, frequency_penalty=2.0)
    assert penalised.choices[0].text != greedy[0]
    assert plain.choices[0].stop_reason is None
    token = plain.choices[0].token_ids[4]
    by_token = await door.complete(
        **SEEDED, extra_body={"stop_token_ids": [token], "ignore_eos": True, "return_token_ids": True}
    )
    assert (
        by_token.choices[0].token_ids == plain.choices[0].token_ids[:5]
        or token in (plain.choices[0].token_ids[:4])
    )


async def test_a_stop_token_is_told_by_its_id(door: Door) -> None:
    """As vLLM has it: the text of a token may be a part of a character. The model's own end is none."""
    asked: Any = {**SEEDED, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    for ask in (door.chat, door.complete):
        ids = (await ask(**asked)).choices[0].token_ids
        part = next(token for token in ids if door.front._chat.text([token]) == "\ufffd")
        more = {**asked, "extra_body": {**asked["extra_body"], "stop_token_ids": [5, part]}}
        (whole,) = (await ask(**more)).choices
        assert (whole.finish_reason, whole.stop_reason, whole.token_ids[-1]) == ("stop", part, part)
        last = [choice async for chunk in await ask(**more, stream=True) for choice in chunk.choices][-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", part)
        any_of_them = {**more, "extra_body": {**more["extra_body"], "stop_token_ids": sorted(set(ids))}}
        assert (await ask(**any_of_them)).choices[0].stop_reason == ids[0]


@pytest.mark.parametrize(("token", "reason"), [(None, None), (0, 0)])
async def test_of_the_models_own_end_no_reason_is_told_and_of_the_first_token_its_id(
    door: Door, monkeypatch: pytest.MonkeyPatch, token: int | None, reason: int | None
) -> None:
    async def generate(request: Request) -> AsyncIterator[Delta | Finish]:
        yield Delta(0, [71, 72], [-1.0, -1.0], [Span(0, 2, 0)])
        yield Finish(0, Reason.STOP, "", token, 0)

    monkeypatch.setattr(door.engine, "generate", generate)
    for ask in (door.chat, door.complete):
        (whole,) = (await ask()).choices
        last = [choice async for chunk in await ask(stream=True) for choice in chunk.choices][-1]
        for told in (whole, last):
            assert (told.finish_reason, told.stop_reason) == ("stop", reason)


async def test_stop_strings_within_min_tokens_are_text_whole_and_streamed(door: Door) -> None:
    """stop_strings.py 3."""
    free: dict[str, Any] = {**SEEDED, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
    text = (await door.complete(**free)).choices[0].text
    stops = [c for c in sorted(set(text)) if text.count(c) > 1 and c.isascii() and c.isprintable()]
    assert stops, "the text says none of its characters twice"
    for stop in stops:
        least = (await door.complete(**free, stop=[stop])).usage.completion_tokens
        held = {**free, "extra_body": {"ignore_eos": True, "min_tokens": least}}
        first = text.index(stop)
        whole = await door.complete(**held, stop=[stop])
        assert whole.choices[0].text == text[: text.index(stop, first + 1)]
        assert whole.choices[0].stop_reason == stop
        streamed = await door.complete(**held, stop=[stop], stream=True)
        pieces = [piece.text async for chunk in streamed for piece in chunk.choices]
        assert "".join(pieces) == whole.choices[0].text
    streamed = await door.complete(**held, stop=[stop, text[first : first + 2]], stream=True)
    pieces = [piece.text async for chunk in streamed for piece in chunk.choices]
    assert "".join(pieces) == text[:first], "one that only begins within them ends it, and is held back"


async def test_a_negative_seed_repeats(door: Door) -> None:
    texts = {(await door.complete(**{**SEEDED, "seed": -3})).choices[0].text for _ in range(2)}
    assert len(texts) == 1


async def test_models_are_the_policy(door: Door) -> None:
    async with door.client() as client:
        (model,) = (await client.models.list()).data
        assert (model.id, model.max_model_len) == (door.model, 256)  # type: ignore[attr-defined]
        assert (await client.models.retrieve(door.model)).id == door.model
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another")


async def test_the_policy_has_the_name_that_it_is_given_and_its_folders(model_folder: Path) -> None:
    """Names may have slashes in them; an answer says the name that was asked for."""
    async with opened(model_folder, openai={"model_name": "org/policy"}) as door:
        (card,) = (await door.plain.models.list()).data
        assert (card.id, card.root) == ("org/policy", str(model_folder))  # type: ignore[attr-defined]
        assert (await door.plain.models.retrieve("org/policy")).id == "org/policy"
        for name in ("org/policy", str(model_folder)):
            for answer in (await door.chat(model=name, max_tokens=1), await door.complete(model=name)):
                assert (answer.model, answer.system_fingerprint) == (name, "org/policy@0")
            async for chunk in await door.chat(model=name, max_tokens=1, stream=True):
                assert (chunk.model, chunk.system_fingerprint) == (name, "org/policy@0")
        for other in (model_folder.name, "policy", "org", ""):
            with pytest.raises(openai.NotFoundError, match="is not served; org/policy is") as away:
                await door.chat(model=other)
            assert (away.value.code, away.value.param) == ("model_not_found", "model")


async def test_a_served_adapter_is_a_model(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(door.engine.info(), adapters=(ServedWeights("run-7", 3, b"d"),))
    monkeypatch.setattr(door.engine, "info", lambda: info)
    say(monkeypatch, door, "hello")
    asked: list[Request] = []
    written = door.engine.generate

    def spied(request: Request) -> Any:
        asked.append(request)
        return written(request)

    monkeypatch.setattr(door.engine, "generate", spied)
    cards = (await door.plain.models.list()).data
    assert [(card.id, card.policy_version) for card in cards] == [  # type: ignore[attr-defined]
        (door.model, 0),
        ("run-7", 3),
    ]
    answer = await door.chat(model="run-7", extra_body={"min_policy_version": 3})
    assert answer.choices[0].message.content == "hello" and answer.system_fingerprint == "run-7@3"
    assert (asked[0].run_id, asked[0].min_version) == ("run-7", 3)
    answer = await door.chat(extra_body={"run_id": "run-7"})
    assert (asked[1].run_id, answer.system_fingerprint) == ("run-7", "run-7@3")

    info = replace(info, adapters=(ServedWeights(door.model, 3, b"d"),))
    assert [card.id for card in (await door.plain.models.list()).data] == [door.model]
    assert (await door.chat()).system_fingerprint == f"{door.model}@3", "the adapter, not the base model"


async def test_what_a_body_names_goes_before_what_its_head_and_its_model_name(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = (ServedWeights("run-7", 3, b"d"), ServedWeights("run-8", 4, b"e"))
    info = replace(door.engine.info(), adapters=runs)
    monkeypatch.setattr(door.engine, "info", lambda: info)
    say(monkeypatch, door, "hello")
    seen = requests_seen(monkeypatch)
    head: Any = {"model": "run-7", "extra_headers": {"X-Session-ID": "of the head"}}
    await door.chat(**head)
    answer = await door.chat(**head, extra_body={"session_id": "of the body", "run_id": "run-8"})
    assert [(one.run_id, one.session_id) for one in seen] == [
        ("run-7", "of the head"),
        ("run-8", "of the body"),
    ]
    assert answer.system_fingerprint == "run-8@4"


async def test_tools_thinking_and_calls_come_in_their_fields(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the random model never writes is put into its mouth; everything around is real."""
    seen = requests_seen(monkeypatch)
    written = 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    say(monkeypatch, door, written)
    answer = await door.chat(tools=[TOOL], max_tokens=200)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a":  1}')
    assert [tool.name for tool in seen[-1].tools] == ["add"]

    stream = await door.chat(tools=[TOOL], max_tokens=200, stream=True)
    content, calls, reason = "", [], None
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += delta.tool_calls or []
        reason = chunk.choices[0].finish_reason or reason
    assert (content, reason) == ("Well.", "tool_calls")
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [(0, "add", '{"a":  1}')]

    refused_tools = await door.chat(tools=[TOOL], tool_choice="none", max_tokens=200)
    assert refused_tools.choices[0].message.content == written
    assert refused_tools.choices[0].message.tool_calls is None and not seen[-1].tools

    history: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    await door.chat(messages=history, max_tokens=2)
    sent = seen[-1].messages.messages
    assert [m.role for m in sent] == ["system", "user", "assistant", "tool"]
    assert sent[1].content == "1+\n1?" and sent[2].tool_calls[0].arguments_json == '{"a":  1}'
    assert sent[3].tool_call_id == call.id


async def test_offsets_of_a_streamed_completion_go_on_from_chunk_to_chunk(door: Door) -> None:
    """As in the answer that is not streamed."""
    asked: Any = {"max_tokens": 150, "logprobs": 0, "seed": 3, "n": 2, "extra_body": {"ignore_eos": True}}
    whole = await door.complete(**asked)
    offsets: dict[int, list[int]] = {0: [], 1: []}
    async for chunk in await door.complete(stream=True, **asked):
        for choice in chunk.choices:
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert [offsets[choice.index] for choice in whole.choices] == [
        choice.logprobs.text_offset for choice in whole.choices
    ]


@pytest.mark.parametrize("named_by_id", [False, True])
async def test_offsets_point_into_the_text_whatever_tokens_are_called(
    door: Door, monkeypatch: pytest.MonkeyPatch, named_by_id: bool
) -> None:
    """A token may be a part of a character, and the end is none of the text."""
    say(monkeypatch, door, "A日B")
    asked: Any = {"logprobs": 0, "extra_body": {"return_tokens_as_token_ids": named_by_id}}
    (choice,) = (await door.complete(**asked)).choices
    assert (choice.text, choice.logprobs.text_offset) == ("A日B", [0, 1, 1, 1, 2, 3])


async def test_a_stream_loses_no_answer_behind_thinking_that_no_mark_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_with_thinking(tmp_path) as door:
        say(monkeypatch, door, "Let me see, and see again.[/THINK]It is four.")
        told = ""
        async for chunk in await door.chat(stream=True):
            told += "".join(choice.delta.content or "" for choice in chunk.choices)
        (choice,) = (await door.chat()).choices
        assert choice.message.content == "It is four." and told.endswith(choice.message.content)


async def test_a_completion_keeps_marks_that_are_special_tokens_streamed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_with_thinking(tmp_path) as door:
        say(monkeypatch, door, "[THINK]abc[/THINK]def")
        (whole,) = (await door.complete(logprobs=0)).choices
        assert whole.text == "[THINK]abc[/THINK]def"
        assert whole.logprobs.text_offset == [0, 7, 8, 9, 10, 18, 19, 20, 21]
        told, offsets = "", []
        async for chunk in await door.complete(logprobs=0, stream=True):
            for choice in chunk.choices:
                told += choice.text
                offsets += choice.logprobs.text_offset if choice.logprobs else []
        assert (told, offsets) == (whole.text, whole.logprobs.text_offset)


def opened_with_thinking(folder: Path) -> AbstractAsyncContextManager[Door]:
    """A front of a model whose marks of thinking are special tokens."""
    marks = ["[THINK]", "[/THINK]"]
    qwen3(0, vocab_size=264).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template += f"{{# {' '.join(marks)} #}}"
    tokenizer.save_pretrained(folder)
    return opened(folder)


async def test_alternatives_have_texts_and_the_bytes_of_their_tokens(door: Door) -> None:
    asked: dict[str, Any] = {**SEEDED, "logprobs": True, "top_logprobs": 4}
    (choice,) = (await door.chat(**asked, extra_body={"ignore_eos": True})).choices
    assert len(choice.logprobs.content) == 40
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 4
        for one in (entry, *entry.top_logprobs):
            assert bytes(one.bytes).decode(errors="replace") == one.token
            assert one.token != "\ufffd" or len(one.bytes) == 1, "a byte of a character, as it is"
        same = [one.logprob for one in entry.top_logprobs if one.token == entry.token]
        assert entry.logprob in same or entry.logprob <= entry.top_logprobs[-1].logprob
    texts = {one.token for entry in choice.logprobs.content for one in entry.top_logprobs}
    assert len(texts) > 20 and "\ufffd" in texts

    messages: Any = [{"role": "user", "content": "hi"}]
    asked |= {"model": door.model, "messages": messages, "extra_body": {"ignore_eos": True}}
    async with door.plain.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        (streamed,) = stream.current_completion_snapshot.choices
    assert streamed.logprobs is not None and streamed.logprobs.content is not None
    for have, want in zip(streamed.logprobs.content, choice.logprobs.content, strict=True):
        assert [one.token for one in have.top_logprobs] == [one.token for one in want.top_logprobs]
        assert have.logprob == pytest.approx(want.logprob, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_an_answers_tokens_are_its_text(
    door: Door, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """chat_reply.py 2: of a character of several tokens, too, as that API has them for."""
    say(monkeypatch, door, "naïve 日本語 🙂")
    answer = await door.chat(logprobs=True, stream=stream)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    told = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    entries = [entry for content in told for entry in content]
    assert "\ufffd" in [entry.token for entry in entries]
    assert bytes(byte for entry in entries for byte in entry.bytes) == "naïve 日本語 🙂<|im_end|>".encode()


async def test_of_tokens_of_one_text_the_best_is_told(door: Door) -> None:
    """/v1/completions names alternatives by their texts: halves of characters have one and the same."""
    (choice,) = (await door.complete(**SEEDED, logprobs=20, extra_body={"ignore_eos": True})).choices
    named = choice.logprobs.top_logprobs
    assert len(named) == 40 and all(len(top) <= 21 for top in named)
    assert any(len(top) < 20 and "\ufffd" in top for top in named)
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, named, strict=True
    ):
        assert top[token] == logprob or (token == "\ufffd" and top[token] > logprob)


async def test_a_request_with_alternatives_in_an_answer_too_large_is_refused(door: Door) -> None:
    """The context counts where it is shorter than max_tokens: 256 tokens, 21 log-probabilities each."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
    assert (await door.chat(**asked, max_tokens=2, n=200)).choices
    with pytest.raises(openai.BadRequestError, match="at most 900000 log-probabilities"):
        await door.chat(**asked, n=168)
    assert (await door.chat(**asked, n=1, max_tokens=2**31)).choices
