"""A service of each engine over gRPC, which follows a weight store of the test.

A test asks for the weights that it wants, and judges every token by the version stamped on it. The services
are the same for all test_conformance_*.py, whose tests run in the session's loop. vLLM takes part where it is
installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from quartet.errors import from_rpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import common_pb2, weights_pb2_grpc
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc
from quartet.weights.service import WeightServicer
from quartet.weights.store import WeightStore
from quartet_inference import app
from quartet_inference.config import InferenceConfig
from quartet_inference.vllm import environment

from .openai_door import Door, watched
from .random_models import weights_of
from .told import TOLERANCE, Told

Make = Callable[..., Any]

RUN = "r"
CONTEXT = 256
SLOTS = 24
UNTIL_SECONDS = 60
VOCABULARY = 260
#: Splits the longer prompts, which must not show.
VLLM_ARGS = {"max_num_batched_tokens": 64}


class Replica:
    """A running service and its OpenAI front, its trainer, and the models whose weights it has served."""

    def __init__(
        self, engine: str, channel: grpc.aio.Channel, store: WeightStore, make: Make, door: Door
    ) -> None:
        self.engine = engine
        self.door = door
        self.tolerance = TOLERANCE[engine]
        self.stub: Any = rpc.InferenceServiceStub(channel)
        self.models: dict[int, Any] = {}
        self._store = store
        self.make = make
        self._version = -1

    async def serve(self, seed: int, model: Any = None) -> Any:
        """Publish the weights of a seed, wait until they are served; the model."""
        self._version += 1
        model = model or self.make(seed)
        self.models[self._version] = model
        await asyncio.to_thread(self._store.publish, RUN, self._version, weights_of(model))
        await self.until(lambda info: (info.run_id, info.policy_version) == (RUN, self._version))
        return model

    async def until(self, true: Callable[[Any], bool]) -> None:
        """Wait for GetModel to say so."""
        async with asyncio.timeout(UNTIL_SECONDS):
            while not true(await self.info()):  # noqa: ASYNC110 - over the wire there is no event to wait for
                await asyncio.sleep(0.003)

    async def info(self) -> Any:
        return await self.stub.GetModel(pb.GetModelRequest(), timeout=10)

    async def ask(self, prompt: Sequence[int], n: int = 1, resumed: int = 0, **wanted: Any) -> list[Told]:
        """Complete a prompt; every position must be told once, in order, with its version."""
        fields = {
            "exact_policy_version", "min_policy_version", "session_id", "run_id", "completion_seeds"
        }  # fmt: skip
        sampling = {"max_tokens": 24, **{k: v for k, v in wanted.items() if k not in fields}}
        request = pb.GenerateRequest(
            tokens=pb.TokensPrompt(token_ids=prompt), n=n, resumed_tokens=resumed,
            sampling=common_pb2.SamplingParams(**sampling),
            **{k: v for k, v in wanted.items() if k in fields},
        )  # fmt: skip
        answers = [Told(list(prompt)) for _ in range(n)]
        try:
            async for frame in self.stub.Generate(request, timeout=120):
                if frame.HasField("delta"):
                    delta = frame.delta
                    spans = [(span.start - resumed, span.length, span.policy_version) for span in delta.spans]
                    answers[delta.index].extend(delta.token_ids, delta.logprobs, spans)
                if frame.HasField("finish"):
                    assert answers[frame.finish.index].finish is None
                    answers[frame.finish.index].finish = frame.finish
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        assert all(answer.finish for answer in answers)
        return answers

    async def one(self, prompt: Sequence[int], **wanted: Any) -> Told:
        return (await self.ask(prompt, **wanted))[0]

    def difference(self, answer: Told, **shaping: Any) -> float:
        return answer.difference(self.models, **shaping)


@pytest.fixture(scope="session")
def make(make_model: Make) -> Make:
    """Models whose heads vLLM's CPU attention knows."""
    return lambda seed, **changes: make_model(seed, **{"head_dim": 32, **changes})


@pytest.fixture(scope="session")
def conformance_folder(make: Make, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        openai={"address": "127.0.0.1:0"},
        **{engine: {"max_num_seqs": SLOTS, "kv_cache_bytes": 1 << 25, **settings}},
    )  # fmt: skip
    health = Health()
    async with AsyncExitStack() as stack:
        with watched() as caught:
            services = await stack.enter_async_context(app.services(config, health))
        server = await start(services, config.server, health)
        door = caught.door(folder, health)
        async with connect(server.address) as channel, door.plain:
            yield Replica(engine, channel, store, make, door)
        await server.stop(0)
    await trainer.stop(0)


@pytest_asyncio.fixture(loop_scope="session", scope="session", params=engines())
async def replica(
    request: pytest.FixtureRequest, conformance_folder: Path, make: Make
) -> AsyncIterator[Replica]:
    """A service of each engine, for all tests of conformance."""
    async with serving(request.param, conformance_folder, make) as replica:
        await replica.serve(0)
        yield replica
