"""Parts of the gateway by themselves: losses, the wire, promises, sessions, configuration."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from quartet.config import ConfigError
from quartet.config.load import load
from quartet.errors import QuartetError
from quartet.inference import INFERENCE
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.replicas import Replicas
from quartet.v1 import inference_service_pb2 as inference_pb
from quartet.v1 import inference_service_pb2_grpc as inference_rpc
from quartet.v1 import trainer_service_pb2 as trainer_pb
from quartet_tinker import adam, bodies, datum, losses, paths, promises
from quartet_tinker import tinker_wire_pb2 as wire
from quartet_tinker.config import GatewayConfig
from quartet_tinker.gateway import Gateway
from quartet_tinker.promises import Promises, answered
from quartet_tinker.refusal import Refused
from quartet_tinker.sampling import Sampling
from quartet_tinker.served import ServedModel
from quartet_tinker.trainer import Trainer

PACKAGE = Path(wire.__file__).parent


def by_autograd(loss_fn: str, config: dict[str, float], logp: Any, inputs: dict[str, Any]) -> Any:
    """The losses of single tokens as the SDK's documentation writes them."""
    import torch

    if loss_fn == "cross_entropy":
        return -logp * inputs["weights"]
    moved, advantages = logp - inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(moved)
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    match loss_fn:
        case "importance_sampling":
            return -ratio * advantages
        case "ppo":
            return -torch.minimum(ratio * advantages, torch.clamp(ratio, low, high) * advantages)
        case "cispo":
            return -torch.clamp(ratio, low, high).detach() * logp * advantages
        case "gspo":
            mean = moved.detach()[inputs["sequence_ratio_mask"] != 0].mean()
            ratio = torch.exp(mean + logp - logp.detach())
            return -torch.minimum(ratio * advantages, torch.clamp(ratio, low, high) * advantages)
        case _:
            return -(logp * advantages - 0.5 * config["beta"] * moved**2)


GIVEN = {"gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}}


@pytest.mark.parametrize("loss_fn", losses.SETTINGS)
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_minus_the_derivative(loss_fn: str, seed: int) -> None:
    import torch

    rng = np.random.default_rng(seed)
    logp_T = -np.abs(rng.normal(2, 2, 200))
    inputs = {
        "weights": rng.normal(0, 1, 200),
        "logprobs": logp_T + rng.normal(0, 0.5, 200),
        "advantages": rng.normal(0, 1, 200),
        "sequence_ratio_mask": rng.integers(0, 2, 200).astype(np.float64),
    }
    config = losses.settings(loss_fn, GIVEN.get(loss_fn, {}))
    loss_T, weight_T = losses.evaluated(loss_fn, config, logp_T, inputs)
    variable = torch.tensor(logp_T, requires_grad=True)
    expected = by_autograd(loss_fn, config, variable, {k: torch.tensor(v) for k, v in inputs.items()})
    expected.sum().backward()
    np.testing.assert_allclose(loss_T, expected.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(weight_T, -cast(Any, variable.grad).numpy(), rtol=1e-12)
    if loss_fn in ("ppo", "cispo"):
        unclipped_T = np.exp(logp_T - inputs["logprobs"]) * inputs["advantages"]
        assert 0 < np.count_nonzero(weight_T != unclipped_T) < 200


def test_thresholds_of_single_tokens_win() -> None:
    logp_T, ones = np.log(np.array([3.0, 3.0])), np.ones(2)
    inputs = {"logprobs": np.zeros(2), "advantages": ones, "clip_high_threshold": np.array([2.0, 4.0])}
    _, weight_T = losses.evaluated("cispo", losses.SETTINGS["cispo"], logp_T, inputs)
    np.testing.assert_allclose(weight_T, [2.0, 3.0])


def test_a_sequence_is_clipped_where_its_caller_says() -> None:
    """What the SDK's service clips at by default is not written anywhere: nothing is guessed."""
    with pytest.raises(Refused, match=r"gspo needs loss_fn_config\.clip_high_threshold here"):
        losses.settings("gspo", {"clip_low_threshold": 0.9})
    logp_T, zeros = np.log(np.array([2.0, 8.0, 1.0])), np.zeros(3)
    inputs = {"logprobs": zeros, "advantages": np.ones(3), "sequence_ratio_mask": np.array([1.0, 1.0, 0.0])}
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 5.0}
    np.testing.assert_allclose(losses.evaluated("gspo", config, logp_T, inputs), [[-4.0] * 3, [4.0] * 3])
    one = wire.Datum()
    one.model_input.add().encoded_text.tokens = np.array([5, 6, 7], dtype="<i4").tobytes()
    for name, values in {**inputs, "sequence_ratio_mask": zeros}.items():
        one.loss_fn_inputs[name].CopyFrom(
            wire.Tensor(dense=values.astype("<f4").tobytes(), dtype=wire.DTYPE_FLOAT32)
        )
    targets = np.array([6, 7, 8], dtype="<i8").tobytes()
    one.loss_fn_inputs["target_tokens"].CopyFrom(wire.Tensor(dense=targets, dtype=wire.DTYPE_INT64))
    with pytest.raises(Refused, match=r"data\[1\]: sequence_ratio_mask is 0 everywhere"):
        datum.read(1, one, "gspo")


def test_the_wire_is_the_sdks(tinker: Any) -> None:
    """Every field that is spoken has the SDK's name, number and type."""
    from tinker.proto import tinker_public_pb2 as theirs

    def described(module: Any) -> dict[str, Any]:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        found: dict[str, Any] = {}
        for message in file.message_type:
            for field in message.field:
                found[f"{message.name}.{field.name}"] = (field.number, field.type, field.label)
            for entry in message.nested_type:
                for field in entry.field:
                    found[f"{message.name}.{entry.name}.{field.name}"] = (
                        field.number,
                        field.type,
                        field.label,
                    )
        for enum in file.enum_type:
            found |= {f"{enum.name}.{value.name}": value.number for value in enum.value}
        return found

    ours, sdks = described(wire), described(theirs)
    assert ours and {key: sdks.get(key) for key in ours} == ours


async def test_a_deletion_does_not_wait_for_what_lasts() -> None:
    """Requests of its model wait for it, and the SDK asks again by itself."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as nobody:
        with pytest.raises(QuartetError, match="NOT_READY"):
            deleting = Trainer(nobody, 3600.0).delete_state("r", trainer_pb.RunSpec(), "kept")
            await asyncio.wait_for(deleting, 10)


def test_the_stub_is_current(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE.parent}", f"--python_out={tmp_path}"]
    source = PACKAGE / "tinker_wire.proto"
    subprocess.run([*command, f"--pyi_out={tmp_path}", str(source)], check=True)
    for name in ("tinker_wire_pb2.py", "tinker_wire_pb2.pyi"):
        assert (tmp_path / PACKAGE.name / name).read_text() == (PACKAGE / name).read_text()


async def test_old_results_make_room_and_open_promises_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MAX_PROMISES", 3)
    kept = Promises()
    first, _ = kept.make("first", b"", "s")
    second, _ = kept.make("second", b"", "s")
    third, _ = kept.make("third", b"", "s")
    with pytest.raises(Refused, match="3 requests are under way") as refused:
        kept.make("fourth", b"", "s")
    assert refused.value.status == 429
    second.settle(answered(x=1))
    kept.make("fourth", b"", "s")
    assert [kept.find(name) is not None for name in ("first", "second", "third", "fourth")] == [
        True,
        False,
        True,
        True,
    ]
    assert first.answer is third.answer is None


async def test_results_are_bounded_in_bytes_and_in_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MAX_BYTES", 100)
    kept = Promises()
    for name in "abc":
        kept.make(name, b"", "s")[0].settle(answered(x="y" * 50))
    kept.make("d", b"", "s")
    assert [name for name in "abcd" if kept.find(name)] == ["c", "d"]
    monkeypatch.setattr(promises, "KEEP_SECONDS", -1.0)
    kept.make("e", b"", "s")
    assert [name for name in "abcde" if kept.find(name)] == ["d", "e"]


async def test_a_fault_of_the_gateway_stays_in_its_log() -> None:
    async def work() -> promises.Answer:
        raise RuntimeError("a secret")

    promise, _ = Promises().make("a", b"", "s")
    await promises.fulfil(promise, work())
    assert promise.answer is not None
    assert promise.answer.body == b'{"error": "the gateway failed; its log says why", "category": "server"}'


async def test_a_silent_session_is_ended() -> None:
    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"], session_seconds=60)
    gateway = Gateway(config, cast(Any, None), cast(Any, None))
    session_id = gateway.create_session(bodies.CreateSession())["session_id"]
    promise, _ = gateway.promises.make("waits", b"", session_id)
    now = asyncio.get_running_loop().time()
    await gateway.end_silent(now + 59)
    gateway.heartbeat(session_id)
    await gateway.end_silent(now + 62)
    with pytest.raises(Refused, match="is not known to this gateway") as refused:
        gateway.heartbeat(session_id)
    assert refused.value.status == 404
    assert promise.answer is not None and b"the session has ended" in promise.answer.body


async def test_sessions_are_bounded() -> None:
    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"], max_sessions=2)
    gateway = Gateway(config, cast(Any, None), cast(Any, None))
    for _ in range(2):
        gateway.create_session(bodies.CreateSession())
    with pytest.raises(Refused, match="max_sessions"):
        gateway.create_session(bodies.CreateSession())


@pytest.mark.parametrize(
    "path",
    [
        "tinker://a/weights",
        "tinker://a/weights/b/c",
        "tinker://a/weights/b@3-0123456789ab",
        "tinker://a/sampler_weights/b@3",
        "tinker://a/sampler_weights/b",
        "a",
    ],
)
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(Refused, match="is none of this gateway"):
        paths.read(path)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"learning_rate": -1.0}, "learning_rate = -1.0 is refused"),
        ({"beta1": "x"}, "beta1 = 'x' is refused"),
        ({"eps": float("inf")}, "eps = inf is refused"),
        ({"beta1": 1.0}, "beta1 = 1.0 is refused; give a number below 1"),
        ({"eps": 0}, "eps = 0 is refused; give a number above 0"),
        ({"momentum": 0.5}, "momentum is not served here"),
    ],
)
def test_odd_constants_are_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        adam.read(params)


def test_the_configuration_closes_the_door(tmp_path: Path) -> None:
    services = ["--trainer", "127.0.0.1:1", "--inference", "127.0.0.1:2"]
    assert load(GatewayConfig, services).config.inference == ["127.0.0.1:2"]
    with pytest.raises(ConfigError, match="off loopback and plaintext"):
        load(GatewayConfig, [*services, "--address", "0.0.0.0:8010"])
    with pytest.raises(ConfigError, match="inference: address 'x' has no port"):
        load(GatewayConfig, [*services, "--inference", "x"])
    key = tmp_path / "key"
    key.write_text("secret\n")
    command = [sys.executable, "-m", "quartet_tinker", *services, "--address", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, "--api-key-file", str(key), "--preflight"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "keys that begin with 'tml-'" in done.stderr) == (2, True)
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, '"trainer": "127.0.0.1:1"' in done.stdout) == (0, True)


async def test_a_tokenizer_in_a_folder_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's working directory is another one; a hub id is said as it is."""

    class Inference:
        async def model(self) -> Any:
            return inference_pb.GetModelResponse(base_model="models/small", max_model_len=64)

    monkeypatch.chdir(tmp_path)
    config = GatewayConfig(trainer="127.0.0.1:1", inference=["127.0.0.1:2"])
    assert (await ServedModel(config, cast(Any, Inference())).names()).tokenizer == "models/small"
    (tmp_path / "models" / "small").mkdir(parents=True)
    names = await ServedModel(config, cast(Any, Inference())).names()
    assert names.tokenizer == str(tmp_path / "models" / "small")
    assert (names.folder, names.name) == ("models/small", "models/small")


async def test_of_replicas_that_are_all_away_it_is_not_said_that_they_hold_other_weights() -> None:
    """The SDK asks again, as after every 503, and then raises what kept each of them."""
    path = paths.read("tinker://s:train:0/sampler_weights/x@1-0123456789ab")
    address = "127.0.0.1:1"
    async with Replicas([address]) as replicas:
        sampling = Sampling(replicas)
        with pytest.raises(Refused, match=f"says whether it serves 'x': replica {address}: ") as no:
            await sampling.check(path)
        assert no.value.status == 503
        arriving = sampling.arrival(path.run_id, b"digest", 0.5)
        with pytest.raises(Refused, match=f"no replica serves the weights: replica {address}: .*NOT_READY"):
            await arriving


class Replica(inference_rpc.InferenceServiceServicer):
    """Serves whatever it is to load, as soon as it may."""

    def __init__(self) -> None:
        self.served: set[str] = set()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def LoadAdapter(self, request: Any, context: Any) -> inference_pb.LoadAdapterResponse:
        self.asked.set()
        await self.may.wait()
        self.served.add(request.run_id)
        return inference_pb.LoadAdapterResponse()

    async def GetModel(self, request: Any, context: Any) -> inference_pb.GetModelResponse:
        adapters = [{"run_id": one, "weights_digest": b"digest"} for one in self.served]
        return inference_pb.GetModelResponse(adapters=adapters)


async def test_weights_reach_every_replica_behind_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headless Service's, which `--inference dns:///name:port` names; one that leaves is heard out."""
    hosts, replicas, servers, port = list[str](), (Replica(), Replica()), [], 0
    for number, servicer in enumerate(replicas):
        service = Service(INFERENCE, inference_rpc.add_InferenceServiceServicer_to_server, servicer)
        config = ServerConfig(address=f"127.0.0.{number + 1}:{port}")
        servers.append(await start([service], config, Health()))
        port = int(servers[0].address.rpartition(":")[2])

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    name = f"dns:///localhost:{port}"
    async with Replicas([name]) as known, asyncio.timeout(30):
        sampling = Sampling(known)
        with pytest.raises(Refused, match="no replica of inference is in service"):
            await sampling.arrival("run", b"digest", 20)
        hosts += ["127.0.0.1", "127.0.0.2"]
        await known.follow([name])
        arriving = asyncio.create_task(sampling.arrival("run", b"digest", 20))
        for one in replicas:
            await one.asked.wait()
        del hosts[1]
        await known.follow([name])
        for one in replicas:
            one.may.set()
        await arriving
    assert [one.served for one in replicas] == [{"run"}, {"run"}]
    for server in servers:
        await server.stop(0)
