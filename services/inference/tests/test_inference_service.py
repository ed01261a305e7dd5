"""The service over loopback gRPC, its weights from a real WeightService."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_inference import service
from quartet_inference.config import InferenceConfig
from quartet_inference.updates import ServedNews

from .engine_calls import until
from .inference_replica import Make, publish, serving
from .random_models import weights_of

SERVICE = "quartet.v1.InferenceService"


def tokens(*ids: int, **fields: Any) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(
        **{"max_tokens": 8, "ignore_eos": True, **fields.pop("sampling", {})}
    )
    return pb.GenerateRequest(tokens=pb.TokensPrompt(token_ids=ids or (1, 2, 3)), sampling=sampling, **fields)


def chat(text: str, **fields: Any) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(**{"max_tokens": 8, **fields.pop("sampling", {})})
    messages = pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content=text)])
    return pb.GenerateRequest(messages=messages, sampling=sampling, **fields)


async def test_generate_from_messages_tokens_and_tail(model_folder: Path) -> None:
    async with serving(model_folder) as replica:
        assert replica.health.why_not(SERVICE) == ""
        model = await replica.model()
        assert (model.policy_version, model.run_id, model.engine, model.dtype) == (
            0,
            "",
            "embedded",
            "float32",
        )
        assert len(model.weights_digest) == 16 and list(model.end_token_ids) == [258]

        deltas, finishes = await replica.generate(chat("hi", n=3, sampling={"max_tokens": 70, "seed": 4}))
        assert sorted(f.index for f in finishes) == [0, 1, 2]
        for index in range(3):
            mine = [d for d in deltas if d.index == index]
            sampled = [t for d in mine for t in d.token_ids]
            assert all(1 <= len(d.token_ids) == len(d.logprobs) <= 64 for d in mine)
            assert sum(s.length for d in mine for s in d.spans) == len(sampled)
            finish = next(f for f in finishes if f.index == index)
            assert finish.usage.completion_tokens == len(sampled)
            assert (finish.finish_reason == pb.FINISH_REASON_STOP) == (sampled[-1] == 258)
        assert replica.start.prefix_kept
        prompt = list(replica.start.prompt_token_ids)

        again, _ = await replica.generate(
            tokens(*prompt, sampling={"max_tokens": 70, "seed": 4, "ignore_eos": False})
        )
        assert [t for d in again for t in d.token_ids] == [
            t for d in deltas if d.index == 0 for t in d.token_ids
        ]

        sampled = [t for d in again for t in d.token_ids]
        request = tokens(*prompt, *sampled)
        request.tokens.tail_messages.add(role="user", content="more")
        _, (finish,) = await replica.generate(request)
        rendered = list(replica.start.prompt_token_ids)
        assert rendered[: len(prompt) + len(sampled)] == prompt + sampled
        assert finish.usage.prompt_tokens == len(rendered) > len(prompt) + len(sampled)


async def test_stop_strings_and_stop_tokens(model_folder: Path) -> None:
    async with serving(model_folder) as replica:
        seeded = {"seed": 11, "max_tokens": 60}
        deltas, (plain,) = await replica.generate(tokens(sampling=seeded))
        sampled = [t for d in deltas for t in d.token_ids]
        stop = next(c for c in plain.message.content[3:] if c.isascii() and c.isprintable())
        _, (stopped,) = await replica.generate(tokens(sampling={**seeded, "stop": [stop]}))
        assert (stopped.finish_reason, stopped.stop_match) == (pb.FINISH_REASON_STOP, stop)
        assert stop not in stopped.message.content
        assert plain.message.content.startswith(stopped.message.content)
        deltas, (by_token,) = await replica.generate(
            tokens(sampling={**seeded, "stop_token_ids": [sampled[5]]})
        )
        assert [t for d in deltas for t in d.token_ids] == sampled[: sampled.index(sampled[5]) + 1]
        assert by_token.finish_reason == pb.FINISH_REASON_STOP


async def test_malformed_requests_are_typed(model_folder: Path) -> None:
    async with serving(model_folder) as replica:
        bad: list[tuple[pb.GenerateRequest, str, str]] = [
            (pb.GenerateRequest(), "INVALID_REQUEST", "prompt"),
            (pb.GenerateRequest(messages=pb.MessagesPrompt()), "INVALID_REQUEST", "messages"),
            (pb.GenerateRequest(tokens=pb.TokensPrompt()), "INVALID_REQUEST", "tokens.token_ids"),
            (tokens(1, 260), "INVALID_REQUEST", "tokens.token_ids"),
            (tokens(1, 2**32 - 1), "INVALID_REQUEST", "tokens.token_ids"),
            (tokens(*[1] * 256), "PROMPT_TOO_LONG", ""),
            (tokens(n=257), "INVALID_REQUEST", "n"),
            (tokens(sampling={"temperature": -1}), "INVALID_REQUEST", "temperature"),
            (tokens(sampling={"temperature": float("nan")}), "INVALID_REQUEST", "temperature"),
            (tokens(sampling={"temperature": 1e-30}), "INVALID_REQUEST", "temperature"),
            (tokens(sampling={"top_p": 0}), "INVALID_REQUEST", "top_p"),
            (tokens(sampling={"min_p": 1.5}), "INVALID_REQUEST", "min_p"),
            (tokens(sampling={"repetition_penalty": 0}), "INVALID_REQUEST", "repetition_penalty"),
            (tokens(sampling={"repetition_penalty": 1e-38}), "INVALID_REQUEST", "repetition_penalty"),
            (tokens(sampling={"presence_penalty": 3}), "INVALID_REQUEST", "presence_penalty"),
            (tokens(sampling={"min_tokens": 3, "max_tokens": 2}), "INVALID_REQUEST", "min_tokens"),
            (tokens(sampling={"max_tokens": 0}), "INVALID_REQUEST", "max_tokens"),
            (tokens(sampling={"stop": [""]}), "INVALID_REQUEST", "stop"),
            (tokens(sampling={"stop": ["x"] * 17}), "INVALID_REQUEST", "stop"),
            (tokens(sampling={"stop_token_ids": [999]}), "INVALID_REQUEST", "stop_token_ids"),
            (tokens(exact_policy_version=1), "VERSION_UNAVAILABLE", ""),
        ]
        bad_tool = chat("x")
        bad_tool.tools.add(name="t", parameters_json="{")
        bad.append((bad_tool, "INVALID_REQUEST", "tools.parameters_json"))
        half_tool = chat("x")
        half_tool.tools.add(name="t", parameters_json=r"""{"title": "\ud83d"}""")
        bad.append((half_tool, "INVALID_REQUEST", "tools.parameters_json"))
        for request, reason, field in bad:
            error = await replica.refusal(request)
            assert (error.reason, error.metadata.get("field", "")) == (reason, field), request
        assert len((await replica.generate(tokens(*[1] * 255)))[1]) == 1, "one token of room is enough"
        edge = {"temperature": 0.01, "repetition_penalty": 0.01, "max_tokens": 2}
        assert (await replica.generate(tokens(1, sampling=edge)))[1], "the bounds themselves are served"
        odd = chat("x")
        odd.messages.messages.add(role="assistant").tool_calls.add(
            name="t", arguments_json=r"""{"a": "\ud83d"}"""
        )
        assert (await replica.generate(odd))[1], "a call that a model may have written is printed as it is"


async def test_a_short_answer_is_one_message(model_folder: Path) -> None:
    async with serving(model_folder) as replica:
        request = chat("hi", sampling={"max_tokens": 4, "ignore_eos": True})
        (whole,) = [response async for response in replica.stub.Generate(request, timeout=20)]
        assert whole.start.prompt_token_ids and len(whole.delta.token_ids) == 4
        assert whole.finish.usage.completion_tokens == 4


async def test_pause_resume_and_cancel(model_folder: Path) -> None:
    async with serving(model_folder) as replica:
        await replica.stub.Pause(pb.PauseRequest(), timeout=5)
        call = replica.stub.Generate(tokens(n=3, sampling={"max_tokens": 200}), timeout=30)
        reader = asyncio.create_task(call.read())
        model = await replica.until(lambda model: model.waiting == 3)
        assert model.paused and model.tokens_sampled == 0
        assert (await replica.stub.Resume(pb.ResumeRequest(), timeout=5)).in_flight == 3
        first = await reader
        assert first.HasField("start") and first.delta.token_ids, "one message says both"
        call.cancel()
        await replica.until(lambda model: model.running == 0)


async def test_versions_arrive_and_requests_wait_for_them(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[float] = []
    wait_for = ServedNews.wait_for

    async def waits(self: ServedNews, suits: Any, timeout_s: float) -> bool:
        waiting.append(timeout_s)
        return await wait_for(self, suits, timeout_s)

    monkeypatch.setattr(ServedNews, "wait_for", waits)
    store = WeightStore(keep=3)
    trainer = await publish(store)
    async with serving(model_folder, weights_address=trainer.address, version_wait_seconds=60) as replica:
        assert "no verified weights" in replica.health.why_not(SERVICE)
        assert (await replica.refusal(tokens())).reason == "NOT_READY"
        early = asyncio.create_task(replica.generate(tokens(run_id="r", min_policy_version=0)))
        await until(lambda: len(waiting) == 1)
        manifest = await asyncio.to_thread(store.publish, "r", 0, weights_of(make_model(0)))
        await early
        model = await replica.until_version("r", 0)
        assert model.updates_applied == 0, "weights that are held already are not fetched"
        assert model.weights_digest == manifest.digest and replica.health.why_not(SERVICE) == ""

        sampled = (await replica.model()).tokens_sampled
        later = asyncio.create_task(replica.generate(tokens(run_id="r", min_policy_version=1)))
        inflight = asyncio.create_task(replica.generate(tokens(sampling={"max_tokens": 250}, n=8)))
        await until(lambda: len(waiting) == 2)
        await replica.until(lambda model: model.tokens_sampled > sampled)
        await asyncio.to_thread(store.publish, "r", 1, weights_of(make_model(1)))
        deltas, _ = await later
        assert {s.policy_version for d in deltas for s in d.spans} == {1}
        deltas, finishes = await inflight
        assert len(finishes) == 8 and {s.policy_version for d in deltas for s in d.spans} <= {0, 1}
        model = await replica.until_version("r", 1)
        assert model.updates_applied == 1 and model.last_update_pause_ms > 0

        late = await replica.refused_in_the_end(tokens(min_policy_version=9))
        assert late.reason == "DEADLINE"
        assert (await replica.refused_in_the_end(tokens(run_id="other"))).reason == "RUN_NOT_SERVED"
        assert (await replica.refusal(tokens(exact_policy_version=0))).reason == "VERSION_UNAVAILABLE"

        await asyncio.to_thread(store.publish, "s", 0, weights_of(make_model(2)))
        await replica.generate(tokens(run_id="s"))
        await replica.until_version("s", 0)
    await trainer.stop(0)


async def test_a_run_that_nothing_can_bring_is_refused_at_once(model_folder: Path) -> None:
    """config.py `excludes`: long before the caller's deadline."""
    alone: dict[str, Any] = {}
    for settings, why in (
        (alone, "follows no trainer"),
        ({"accept_push": True, "run_id": "r"}, "takes only what run r pushes"),
    ):
        async with serving(model_folder, **settings) as replica:
            refusal = await replica.refusal(tokens(run_id="other"), timeout_s=600)
            assert refusal.reason == "RUN_NOT_SERVED"
            assert why in refusal.message and "what is served: the base model" in refusal.message
    for settings in ({"accept_push": True}, {"accept_push": True, "run_id": "other"}):
        assert not InferenceConfig(model=model_folder, **settings).excludes("other")


async def test_a_restarted_trainer_is_followed_by_what_it_announces(
    model_folder: Path, make_model: Make
) -> None:
    first = WeightStore(keep=2)
    trainer = await publish(first)
    address = trainer.address
    await asyncio.to_thread(first.publish, "r", 5, weights_of(make_model(1)))
    async with serving(model_folder, weights_address=address) as replica:
        await replica.until_version("r", 5)
        await trainer.stop(0)
        assert (await replica.generate(tokens()))[1], "the old version goes on serving"
        second = WeightStore(keep=2)
        manifest = await asyncio.to_thread(second.publish, "r", 5, weights_of(make_model(2)))
        trainer = await publish(second, address)
        model = await replica.until(lambda model: model.weights_digest == manifest.digest)
        assert model.updates_applied == 2
        await asyncio.to_thread(second.publish, "r", 6, weights_of(make_model(1)))
        await replica.until_version("r", 6)
    await trainer.stop(0)


async def test_who_waits_for_a_version_is_told_that_the_trainer_does_not_answer(
    model_folder: Path, make_model: Make
) -> None:
    """Another replica may have it: it may be the way from this one alone that is cut."""
    store = WeightStore(keep=2)
    trainer = await publish(store)
    address = trainer.address
    await asyncio.to_thread(store.publish, "r", 5, weights_of(make_model(1)))
    async with serving(model_folder, weights_address=address) as replica:
        await replica.until_version("r", 5)
        await trainer.stop(0)
        # The words change while the server goes.
        model = await replica.until(lambda model: "Connection refused" in model.update_refused)
        assert model.update_refused.startswith("versions are not announced")
        answer = aiter(replica.stub.Generate(tokens(min_policy_version=6), timeout=60))
        told = await anext(answer)
        assert told.HasField("heartbeat") and told.held_up == model.update_refused
        of_another = replica.stub.Generate(tokens(run_id="another"), timeout=20)
        assert (await of_another.read()).held_up == model.update_refused, "a run can be waited for, too"
        of_another.cancel()
        first = await replica.stub.Generate(tokens(min_policy_version=5), timeout=20).read()
        assert first.HasField("start") and not first.held_up, "what is here is not waited for"
        await asyncio.to_thread(store.publish, "r", 6, weights_of(make_model(2)))
        trainer = await publish(store, address)
        frames = [frame async for frame in answer]
        assert frames[-1].HasField("finish"), "it went on waiting"
        assert not (await replica.until_version("r", 6)).update_refused
    await trainer.stop(0)


async def test_heartbeats_say_what_is_waited_for(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEARTBEAT_SECONDS", 0.1)
    async with serving(model_folder, accept_push=True) as replica:
        call = replica.stub.Generate(tokens(run_id="nobody"), timeout=20)
        beat = await call.read()
        assert beat.HasField("heartbeat") and not beat.held_up
        assert beat.waits_for == "run nobody, which is not served here; what is served: the base model"
        call.cancel()
        await replica.stub.Pause(pb.PauseRequest())
        answer = aiter(replica.stub.Generate(tokens(), timeout=20))
        assert (await anext(answer)).waits_for == "Resume: decoding is paused (Pause)"
        await replica.stub.Resume(pb.ResumeRequest())
        frames = [frame async for frame in answer]
        assert frames[-1].HasField("finish")
        error = await replica.refusal(tokens(exact_policy_version=7))
        assert "version 0 is served, and exact_policy_version = 7 has not come" in error.message
        with pytest.raises(grpc.RpcError) as refused:
            await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="r"), timeout=20)
        assert "push the adapter (WeightService.Push)" in from_rpc(refused.value).message


async def test_a_version_that_does_not_fit_leaves_the_old_one(
    model_folder: Path, make_model: Make, refusals: list[QuartetError]
) -> None:
    """Invariant 3: what was not verified whole is never reported."""
    store = WeightStore(keep=4)
    trainer = await publish(store)
    async with serving(model_folder, weights_address=trainer.address) as replica:
        partial = dict(list(weights_of(make_model(1)).items())[:3])
        await asyncio.to_thread(store.publish, "r", 0, partial)
        async with asyncio.timeout(60):
            while "could not be taken" not in replica.health.why_not(SERVICE):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.to_thread(store.publish, "r", 1, weights_of(make_model(1)))
        await replica.until_version("r", 1)
        await asyncio.to_thread(store.publish, "r", 2, partial)
        await until(lambda: len(refusals) == 2)
        assert (await replica.model()).policy_version == 1
        assert (await replica.generate(tokens(exact_policy_version=1)))[1]
        await asyncio.to_thread(store.publish, "r", 3, weights_of(make_model(2)))
        await replica.until_version("r", 3)
    await trainer.stop(0)


def test_dry_run_loads_no_torch(model_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['q', '--model', {str(model_folder)!r}, '--dry-run']\n"
        "try:\n    runpy.run_module('quartet_inference', run_name='__main__')\n"
        "except SystemExit as e:\n    assert e.code == 0, e.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    command = [sys.executable, "-m", "quartet_inference", "--dry-run", "--model"]
    missing = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2 and "no model folder is there" in missing.stderr
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("elsewhere")
    unreadable = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert unreadable.returncode == 2 and "cannot read model.safetensors there" in unreadable.stderr
    wrong = subprocess.run(
        [*command, str(model_folder), "--embedded.kv-on-updat", "keep"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert wrong.returncode == 2 and "kv_on_update" in wrong.stderr
    (tmp_path / "template").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="it is not UTF-8 at byte 0"):
        InferenceConfig.model_validate(
            {"model": model_folder, "chat": {"template_file": tmp_path / "template"}}
        )
    with pytest.raises(ValueError, match="weights_address: address 'trainer' has no port; write host:port"):
        InferenceConfig(model=model_folder, weights_address="trainer")
