"""What every engine must do, over gRPC, against a plain forward pass of transformers.

The service of each engine follows a weight store of the test, one after the other; a test asks for the
weights that it wants, and judges every token by the version stamped on it. vLLM takes part where it is
installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import common_pb2, rollout_pb2, weights_pb2_grpc
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc
from quartet.weights.service import WeightServicer
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import app
from quartet_inference.config import InferenceConfig
from quartet_inference.vllm import environment

Make = Callable[..., Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = "r"
CONTEXT = 256
SLOTS = 24
UNTIL_SECONDS = 30
VOCABULARY = 260
#: Largest |log-probability - plain forward| in float32.
TOLERANCE = {"embedded": 2e-5, "vllm": 5e-5}
#: Splits the longer prompts, which must not show.
VLLM_ARGS = {"max_num_batched_tokens": 64}


@dataclass
class Answer:
    """One completion."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Any = None

    @property
    def text(self) -> str:
        return str(self.finish.message.content)


class Replica:
    """A running service, its trainer, and the models whose weights it has served."""

    def __init__(self, engine: str, channel: grpc.aio.Channel, store: WeightStore, make_model: Make) -> None:
        self.engine = engine
        self.tolerance = TOLERANCE[engine]
        self.stub: Any = rpc.InferenceServiceStub(channel)
        self.models: dict[int, Any] = {}
        self._store = store
        self._make_model = make_model
        self._version = -1

    async def serve(self, seed: int, model: Any = None) -> Any:
        """Publish the weights of a seed, wait until they are served; the model."""
        self._version += 1
        model = model or self._make_model(seed)
        self.models[self._version] = model
        tensors = {
            name: Tensor("F32", tuple(p.shape), p.detach().clone().numpy().tobytes())
            for name, p in model.named_parameters()
        }
        await asyncio.to_thread(self._store.publish, RUN, self._version, tensors)
        await self.until(lambda info: (info.run_id, info.policy_version) == (RUN, self._version))
        return model

    async def until(self, true: Callable[[Any], bool]) -> None:
        """Wait for GetModel to say so."""
        async with asyncio.timeout(UNTIL_SECONDS):
            while not true(await self.info()):  # noqa: ASYNC110 - over the wire there is no event to wait for
                await asyncio.sleep(0.003)

    async def info(self) -> Any:
        return await self.stub.GetModel(pb.GetModelRequest(), timeout=10)

    async def ask(self, prompt: Sequence[int], n: int = 1, resumed: int = 0, **wanted: Any) -> list[Answer]:
        """Complete a prompt; every position must be told once, in order, with its version."""
        fields = {"exact_policy_version", "min_policy_version", "session_id", "run_id"}
        sampling = {"max_tokens": 24, **{k: v for k, v in wanted.items() if k not in fields}}
        request = pb.GenerateRequest(
            tokens=pb.TokensPrompt(token_ids=prompt), n=n, resumed_tokens=resumed,
            sampling=common_pb2.SamplingParams(**sampling),
            **{k: v for k, v in wanted.items() if k in fields},
        )  # fmt: skip
        answers = [Answer(list(prompt)) for _ in range(n)]
        try:
            async for frame in self.stub.Generate(request, timeout=120):
                kind = frame.WhichOneof("frame")
                if kind == "delta":
                    _extend(answers[frame.delta.index], frame.delta, resumed)
                elif kind == "finish":
                    assert answers[frame.finish.index].finish is None
                    answers[frame.finish.index].finish = frame.finish
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        assert all(answer.finish for answer in answers)
        return answers

    async def one(self, prompt: Sequence[int], **wanted: Any) -> Answer:
        return (await self.ask(prompt, **wanted))[0]

    def difference(self, answer: Answer, **sampling: Any) -> float:
        """The largest |engine - plain forward| over all tokens, by the version stamped on each."""
        worst = 0.0
        for version in set(answer.versions):
            plain = plain_logprobs(self.models[version], answer.prompt, answer.tokens, **sampling)
            chosen = plain.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
            mine = torch.tensor(answer.versions) == version
            worst = max(worst, (chosen - torch.tensor(answer.logprobs))[mine].abs().max().item())
        return worst


def _extend(answer: Answer, delta: Any, resumed: int) -> None:
    assert answer.finish is None and 1 <= len(delta.token_ids) <= 64
    for span in delta.spans:
        assert span.start == resumed + len(answer.versions) and span.length > 0
        answer.versions.extend([span.policy_version] * span.length)
    answer.tokens.extend(delta.token_ids)
    answer.logprobs.extend(delta.logprobs)
    assert len(answer.versions) == len(answer.tokens) == len(answer.logprobs)


@torch.no_grad()
def plain_logprobs(
    model: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    resumed: int = 0,
) -> torch.Tensor:
    """The distribution before each token, after penalties and temperature: [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    before = list(prompt[len(prompt) - resumed :])
    for position in range(len(tokens)):
        counts = Counter([*before, *tokens[:position]])
        seen = torch.tensor(sorted({*prompt, *counts}))
        row = logits[position]
        row[seen] = torch.where(row[seen] > 0, row[seen] / repetition_penalty, row[seen] * repetition_penalty)
        for token, count in counts.items():
            row[token] -= frequency_penalty * count + presence_penalty
    return torch.log_softmax(logits / (temperature or 1.0), -1)


def random_prompt(rng: random.Random, longest: int = 120) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(1, longest))]


@pytest.fixture(scope="module")
def make(make_model: Make) -> Make:
    """Models whose heads vLLM's CPU attention knows."""
    return lambda seed, **changes: make_model(seed, **{"head_dim": 32, **changes})


@pytest.fixture(scope="module")
def folder(make: Make, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model seed 0 with the tokenizer of the other tests."""
    folder = tmp_path_factory.mktemp("conformance")
    for file in model_folder.iterdir():
        if file.name.startswith(("tokenizer", "special", "chat")):
            (folder / file.name).write_bytes(file.read_bytes())
    make(0).save_pretrained(folder)
    return folder


def engines() -> list[Any]:
    missing = importlib.util.find_spec("vllm") is None
    skip = pytest.mark.skipif(missing, reason="vLLM is not installed in this interpreter (make install-vllm)")
    return ["embedded", pytest.param("vllm", marks=skip)]


@asynccontextmanager
async def serving(engine: str, folder: Path, make: Make, **settings: Any) -> AsyncIterator[Replica]:
    if engine == "vllm":
        environment.prepare(threads=1)
        settings["args"] = VLLM_ARGS
    store = WeightStore(keep=2)
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    trainer = await start(
        [Service("quartet.v1.WeightService", add, WeightServicer(store))],
        ServerConfig(address="127.0.0.1:0"), Health(),
    )  # fmt: skip
    config = InferenceConfig(
        model=folder, engine=engine, max_model_len=CONTEXT, weights_address=trainer.address, run_id=RUN,
        **{engine: {"max_num_seqs": SLOTS, "kv_cache_bytes": 1 << 25, **settings}},
    )  # fmt: skip
    health = Health()
    async with app.services(config, health) as services:
        server = await start(services, config.server, health)
        async with connect(server.address) as channel:
            yield Replica(engine, channel, store, make)
        await server.stop(0)
    await trainer.stop(0)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=engines())
async def replica(request: pytest.FixtureRequest, folder: Path, make: Make) -> AsyncIterator[Replica]:
    """A service of each engine, for all tests of this module."""
    async with serving(request.param, folder, make) as replica:
        await replica.serve(0)
        yield replica


async def test_greedy_tokens_and_their_logprobs_are_those_of_a_plain_forward(replica: Replica) -> None:
    model = await replica.serve(1)
    rng = random.Random(1)
    prompts = [random_prompt(rng, 200) for _ in range(30)]
    answers = await asyncio.gather(*[replica.one(p, temperature=0, ignore_eos=True) for p in prompts])
    for answer in answers:
        plain = plain_logprobs(model, answer.prompt, answer.tokens)
        best = plain.max(-1).values
        chosen = plain.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (best - chosen).max() <= replica.tolerance, "not the best token, nor one that ties with it"
        assert replica.difference(answer) <= replica.tolerance


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.2, "temperature": 0.9},
        {"repetition_penalty": 1.4, "temperature": 0.8},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ],
    ids=lambda sampling: ",".join(sampling) or "plain",
)
async def test_sampled_logprobs_are_those_before_truncation(
    replica: Replica, sampling: dict[str, Any]
) -> None:
    rng = random.Random(2)
    prompts = [random_prompt(rng) for _ in range(8)]
    groups = await asyncio.gather(*[replica.ask(p, n=3, ignore_eos=True, **sampling) for p in prompts])
    shaping = {k: v for k, v in sampling.items() if k not in ("top_p", "top_k", "min_p")}
    answers = [answer for group in groups for answer in group]
    assert max(replica.difference(answer, **shaping) for answer in answers) <= replica.tolerance
    model = replica.models[answers[0].versions[0]]
    for answer in answers:
        plain = plain_logprobs(model, answer.prompt, answer.tokens, **shaping)
        chosen = plain.gather(-1, torch.tensor(answer.tokens)[:, None])
        better = (plain > chosen + 1e-4).sum(-1)
        mass_of_better = torch.where(plain > chosen + 1e-4, plain.exp(), 0.0).sum(-1)
        if "top_k" in sampling:
            assert better.max() < sampling["top_k"]
        if "top_p" in sampling:
            assert mass_of_better.max() < sampling["top_p"] + 1e-4
        if "min_p" in sampling:
            least = plain.max(-1).values + torch.tensor(sampling["min_p"]).log()
            assert (chosen[:, 0] >= least - 1e-4).all()
        if sampling.get("temperature") == 0.0:
            assert better.max() == 0


async def test_what_is_drawn_follows_the_distribution(replica: Replica) -> None:
    """2048 first tokens: their surprise is the entropy, the likeliest comes as often as it should."""
    model = await replica.serve(3)
    prompt = list(range(20))
    groups = await asyncio.gather(
        *[replica.ask(prompt, n=256, max_tokens=1, temperature=0.7, seed=seed) for seed in range(8)]
    )
    plain = plain_logprobs(model, prompt, [0], temperature=0.7)[0].double()
    drawn = [answer.tokens[0] for group in groups for answer in group]
    likely = int(plain.argmax())
    chance = plain[likely].exp().item()
    deviation = (len(drawn) * chance * (1 - chance)) ** 0.5
    assert abs(drawn.count(likely) - len(drawn) * chance) < 4.5 * deviation
    surprise = -plain[torch.tensor(drawn)]
    entropy = -(plain.exp() * plain).sum().item()
    spread = (surprise.var() / len(drawn)).sqrt().item()
    assert abs(surprise.mean().item() - entropy) < 4.5 * spread


async def test_seeds_decide_whoever_else_is_in_the_batch(replica: Replica) -> None:
    rng = random.Random(3)
    prompt, wanted = random_prompt(rng, 100), {"temperature": 0.9, "ignore_eos": True}
    alone = await replica.ask(prompt, n=3, seed=5, **wanted)
    assert len({tuple(a.tokens) for a in alone}) == 3
    noise = [replica.ask(random_prompt(rng), max_tokens=50) for _ in range(30)]
    crowded, *_ = await asyncio.gather(replica.ask(prompt, n=3, seed=5, **wanted), *noise)
    assert [a.tokens for a in crowded] == [a.tokens for a in alone]
    for other in (6, 2**64 - 1, None):
        different = await replica.ask(prompt, n=3, **wanted, **({} if other is None else {"seed": other}))
        assert [a.tokens for a in different] != [a.tokens for a in alone]


async def test_stop_strings_stop_tokens_and_end_tokens(replica: Replica) -> None:
    rng = random.Random(4)
    prompt, wanted = random_prompt(rng, 30), {"seed": 11, "max_tokens": 60}
    plain = await replica.one(prompt, ignore_eos=True, **wanted)
    assert plain.finish.finish_reason == pb.FINISH_REASON_LENGTH and len(plain.tokens) == 60
    token = plain.tokens[6]
    stopped = await replica.one(prompt, ignore_eos=True, stop_token_ids=[token, 259], **wanted)
    assert stopped.tokens == plain.tokens[: plain.tokens.index(token) + 1]
    assert stopped.finish.finish_reason == pb.FINISH_REASON_STOP
    stop = next(c for c in plain.text[3:] if c.isascii() and c.isprintable())
    by_text = await replica.one(prompt, ignore_eos=True, stop=["\x00never", stop], **wanted)
    assert (by_text.finish.finish_reason, by_text.finish.stop_match) == (pb.FINISH_REASON_STOP, stop)
    assert by_text.tokens == plain.tokens[: len(by_text.tokens)]
    assert by_text.text == plain.text[: plain.text.find(stop)]
    assert by_text.finish.usage.completion_tokens == len(by_text.tokens)

    end = (await replica.info()).end_token_ids[0]
    wanted = {"max_tokens": 200, "temperature": 4.0}
    answers = await asyncio.gather(*[replica.one(random_prompt(rng, 30), **wanted) for _ in range(20)])
    ended = [a for a in answers if a.finish.finish_reason == pb.FINISH_REASON_STOP]
    assert ended and all(a.tokens[-1] == end and end not in a.tokens[:-1] for a in ended)
    assert all(a.finish.stop_match == "" for a in ended)
    through = await asyncio.gather(*[replica.one(a.prompt, ignore_eos=True, **wanted) for a in answers])
    assert all(len(a.tokens) == 200 for a in through) and any(end in a.tokens for a in through)


async def test_completions_and_turns_share_their_prefix(replica: Replica) -> None:
    await replica.serve(4)
    prompt = [random.Random(5).randrange(256) for _ in range(100)]
    group = await replica.ask(prompt, n=8, session_id="s")
    cached = sorted(a.finish.usage.cached_tokens for a in group)
    assert cached[0] == 0 and all(one >= 96 for one in cached[1:]), cached
    turn = await replica.one(prompt + group[3].tokens + [1, 2, 3], session_id="s")
    assert turn.finish.usage.cached_tokens >= 96
    assert turn.finish.usage.prompt_tokens == len(turn.prompt)
    assert max(replica.difference(a) for a in [*group, turn]) <= replica.tolerance


async def test_cancelled_calls_free_their_slots(replica: Replica) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=250, ignore_eos=True)
    request = pb.GenerateRequest(tokens=pb.TokensPrompt(token_ids=[1, 2]), n=SLOTS, sampling=sampling)
    for _ in range(3):
        call = replica.stub.Generate(request, timeout=60)
        while (await call.read()).WhichOneof("frame") != "delta":
            pass
        assert (await replica.info()).running > 0
        call.cancel()
        await replica.until(lambda info: info.running + info.waiting == 0)
    async with asyncio.timeout(UNTIL_SECONDS):
        assert len(await replica.ask([3], n=SLOTS, max_tokens=4)) == SLOTS


async def test_prompts_that_cannot_be_completed_are_refused(replica: Replica) -> None:
    for prompt, reason in (
        ([1] * CONTEXT, "PROMPT_TOO_LONG"),
        ([], "INVALID_REQUEST"),
        ([1, VOCABULARY], "INVALID_REQUEST"),
        ([2**32 - 1], "INVALID_REQUEST"),
    ):
        with pytest.raises(QuartetError) as caught:
            await replica.ask(prompt)
        assert caught.value.reason == reason, prompt
    for field_, value in (("temperature", -1.0), ("top_p", 0.0), ("min_p", 2.0), ("max_tokens", 0)):
        with pytest.raises(QuartetError) as caught:
            await replica.ask([1], **{field_: value})
        assert caught.value.metadata["field"] == field_
    full = await replica.one([1] * (CONTEXT - 1), max_tokens=50)
    assert len(full.tokens) == 1 and full.finish.finish_reason in (
        pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP,
    )  # fmt: skip


async def test_three_hundred_requests_at_once(replica: Replica) -> None:
    await replica.serve(5)
    rng = random.Random(6)
    prompts = [random_prompt(rng, 60) for _ in range(300)]
    answers = await asyncio.gather(*[replica.one(p, max_tokens=16) for p in prompts])
    assert all(1 <= len(a.tokens) <= 16 for a in answers)
    assert max(replica.difference(a) for a in answers[::10]) <= replica.tolerance
    info = await replica.info()
    assert info.running == info.waiting == 0


async def test_updates_in_flight_drop_nothing_and_every_token_tells_its_version(replica: Replica) -> None:
    """Invariant 3. With recomputed keys each token is that of a plain forward of its version."""
    rng = random.Random(7)
    wanted = {"max_tokens": 80, "ignore_eos": True, "temperature": 0.8}
    calls = [asyncio.create_task(replica.one(random_prompt(rng, 60), **wanted)) for _ in range(30)]
    await asyncio.sleep(0.1)
    for seed in (6, 7, 8):
        await replica.serve(seed)
        calls += [asyncio.create_task(replica.one(random_prompt(rng, 60), **wanted)) for _ in range(10)]
        await asyncio.sleep(0.1)
    answers = await asyncio.gather(*calls)
    assert all(len(a.tokens) == 80 and a.versions == sorted(a.versions) for a in answers)
    crossed = [a for a in answers if len(set(a.versions)) > 1]
    assert crossed, "no request was in flight at an update"
    assert max(replica.difference(a, temperature=0.8) for a in answers) <= replica.tolerance


async def test_seeded_sampling_goes_on_through_an_update(replica: Replica) -> None:
    """The same weights under another number: not a token differs."""
    model = await replica.serve(9)
    wanted = {"max_tokens": 150, "ignore_eos": True, "seed": 3}
    quiet = await replica.ask([1, 2, 3], n=4, **wanted)
    call = asyncio.create_task(replica.ask([1, 2, 3], n=4, **wanted))
    await asyncio.sleep(0.05)
    with torch.no_grad():
        other = replica._make_model(9)
    other.load_state_dict(model.state_dict())
    await replica.serve(9, model=other)
    assert [a.tokens for a in await call] == [a.tokens for a in quiet]


async def test_pinned_requests_end_when_their_version_leaves(replica: Replica) -> None:
    await replica.serve(10)
    version = max(replica.models)
    wanted = {"max_tokens": 250, "ignore_eos": True}
    pinned = [
        asyncio.create_task(replica.ask([1], n=8, exact_policy_version=version, **wanted)) for _ in range(4)
    ]
    free = asyncio.create_task(replica.ask([1], n=4, **wanted))
    await replica.until(lambda info: info.running > 0)
    await replica.serve(11)
    for call in pinned:
        with pytest.raises(QuartetError) as caught:
            await call
        assert caught.value.reason == "VERSION_UNAVAILABLE"
    assert all(len(answer.tokens) == 250 for answer in await free)
    exact = await replica.one([1, 2], exact_policy_version=max(replica.models))
    assert set(exact.versions) == {max(replica.models)}


async def test_pause_holds_requests_and_updates_come_through(replica: Replica) -> None:
    await replica.stub.Pause(pb.PauseRequest(), timeout=10)
    before = (await replica.info()).tokens_sampled
    call = asyncio.create_task(replica.ask([4, 5], n=3))
    await replica.until(lambda info: info.waiting == 3)
    await replica.serve(12)
    info = await replica.info()
    assert info.paused and info.tokens_sampled == before and not call.done()
    assert (await replica.stub.Resume(pb.ResumeRequest(), timeout=10)).in_flight == 3
    assert all(set(a.versions) == {max(replica.models)} for a in await call)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"seed": 4},
        {"seed": 4, "top_p": 0.9, "temperature": 0.8},
        {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"seed": 9, "frequency_penalty": 1.0, "presence_penalty": 0.3},
    ],
    ids=lambda sampling: ",".join(sampling),
)
async def test_a_completion_begun_elsewhere_goes_on_as_if_it_had_not_moved(
    replica: Replica, sampling: dict[str, Any]
) -> None:
    rng = random.Random(8)
    prompt = random_prompt(rng, 50)
    wanted = {"max_tokens": 40, "ignore_eos": True, **sampling}
    whole = await replica.one(prompt, **wanted)
    for done in (1, 17, 39):
        rest = await replica.one(prompt + whole.tokens[:done], resumed=done, **wanted)
        assert rest.tokens == whole.tokens[done:]
        assert rest.finish.finish_reason == whole.finish.finish_reason
        assert rest.finish.usage.completion_tokens == 40
        assert rest.finish.usage.prompt_tokens == len(prompt)
        apart = max(abs(a - b) for a, b in zip(rest.logprobs, whole.logprobs[done:], strict=True))
        assert apart <= replica.tolerance
        assert rest.text == whole.text
    over = await replica.one(prompt + whole.tokens, resumed=40, **wanted)
    assert over.tokens == [] and over.finish.finish_reason == pb.FINISH_REASON_LENGTH
    assert over.text == whole.text


async def test_a_resumed_completion_ends_where_it_would_have_ended(replica: Replica) -> None:
    prompt, wanted = [7, 8, 9], {"seed": 21, "max_tokens": 60, "ignore_eos": True}
    whole = await replica.one(prompt, **wanted)
    pairs = [whole.text[i : i + 2] for i in range(3, len(whole.text) - 1)]
    stop = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
    stopped = await replica.one(prompt, stop=[stop], **wanted)
    assert stopped.finish.stop_match == stop
    cut = len(stopped.tokens) - 1  # between the two characters of the stop string
    rest = await replica.one(prompt + stopped.tokens[:cut], resumed=cut, stop=[stop], **wanted)
    assert rest.tokens == stopped.tokens[cut:] and rest.finish.stop_match == stop
    assert rest.text == stopped.text
    done = len(stopped.tokens)
    ended = await replica.one(prompt + stopped.tokens, resumed=done, stop=[stop], **wanted)
    assert ended.tokens == [] and ended.finish.stop_match == stop


async def test_given_tokens_are_scored_as_a_plain_forward_scores_them(replica: Replica) -> None:
    model = await replica.serve(13)
    rng = random.Random(9)
    lengths = [2, 5, 60, 200, CONTEXT]
    sequences = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    samples = []
    for tokens in sequences:
        first = rng.randint(1, len(tokens) - 1)
        spans = [rollout_pb2.PolicySpan(start=first, length=len(tokens) - first)]
        samples.append(rollout_pb2.Sample(token_ids=tokens, spans=spans))
    noise = asyncio.create_task(replica.ask([1], n=16, max_tokens=100))
    scored = await replica.stub.Score(pb.ScoreRequest(samples=samples), timeout=60)
    await noise
    for sample, tokens, answer in zip(samples, sequences, scored.samples, strict=True):
        first = sample.spans[0].start
        plain = plain_logprobs(model, tokens[:1], tokens[1:])
        expected = plain.gather(-1, torch.tensor(tokens[1:])[:, None])[first - 1 :, 0]
        assert (expected - torch.tensor(list(answer.logprobs))).abs().max() <= replica.tolerance
        assert answer.policy_version == max(replica.models)


async def test_broken_weights_fail_requests_and_good_ones_heal(replica: Replica) -> None:
    broken = replica._make_model(14)
    with torch.no_grad():
        broken.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    await replica.serve(14, model=broken)
    with pytest.raises(QuartetError) as caught:
        await replica.ask(list(range(40)), n=4)
    assert caught.value.reason == "INTERNAL"
    await replica.serve(15)
    answers = await replica.ask(list(range(40)), n=4)
    assert max(replica.difference(a) for a in answers) <= replica.tolerance


async def test_a_version_of_another_model_is_refused_and_changes_nothing(replica: Replica) -> None:
    model = await replica.serve(16)
    served = (await replica.info()).policy_version
    wrong = replica._make_model(17, num_hidden_layers=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await replica.serve(17, model=wrong)
    assert (await replica.info()).policy_version == served
    answer = await replica.one([1, 2, 3])
    assert set(answer.versions) == {served} and replica.difference(answer) <= replica.tolerance
    await replica.serve(16, model=model)
