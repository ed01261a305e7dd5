"""What the replicas of inference serve, asked before a run samples."""

from __future__ import annotations

import asyncio

import pytest
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from quartet.v1.weights_pb2 import Canary
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_orchestrator import adapter_loads
from quartet_orchestrator.policies import Policies, Standing
from quartet_orchestrator.trainer_client import TrainerClient


class Replica(InferenceServiceServicer):
    def __init__(self):
        self.model = ipb.GetModelResponse()
        self.reason = "INVALID_REQUEST"
        self.refusal = "adapters are served upon the model of this replica's folder"
        # What GetModel answers instead.
        self.fault = ""
        self.unloaded = []
        # Digests of what LoadAdapter loads, one after the other; else it is refused.
        self.loads = []
        # Whether LoadAdapter takes longer than anybody waits.
        self.is_slow = False

    async def GetModel(self, request, context):
        if self.fault:
            raise QuartetError(self.fault, "CUDA error")
        return self.model

    async def UnloadAdapter(self, request, context):
        self.unloaded.append(request.run_id)
        del self.model.adapters[:]
        return ipb.UnloadAdapterResponse()

    async def LoadAdapter(self, request, context):
        if self.is_slow:
            await asyncio.Event().wait()
        if self.loads:
            digest = self.loads.pop(0)
            self.model.adapters.add(run_id=request.run_id, policy_version=0, weights_digest=digest)
            return ipb.LoadAdapterResponse()
        raise QuartetError(self.reason, self.refusal)


@pytest.fixture
async def replicas():
    found = [Replica(), Replica()]
    servers = [
        await start([Service("i", add_InferenceServiceServicer_to_server, one)], ServerConfig(), Health())
        for one in found
    ]
    policies = Policies([server.address for server in servers], ClientSecurity())
    yield found, policies
    await policies.close()
    for server in servers:
        await server.stop(0)


async def test_one_replica_at_the_version_is_enough(replicas):
    found, policies = replicas
    found[1].model.run_id, found[1].model.policy_version = "run", 3
    await policies.serving("run", 3)
    with pytest.raises(QuartetError, match="at version 4 yet") as caught:
        await policies.serving("run", 4)
    assert caught.value.reason == "NOT_READY"
    assert "serves its own model" in caught.value.message and "version 3" in caught.value.message


async def test_what_is_served_instead_is_said(replicas):
    found, policies = replicas
    for replica in found:
        replica.model.run_id, replica.model.policy_version = "other", 9
        replica.model.update_refusals.add(why="version 0 could not be taken: tensor w")
    with pytest.raises(
        QuartetError, match="serves run 'other'; nothing newer comes to it: version 0 could"
    ) as caught:
        await policies.serving("run", 0)
    assert "of another orchestrator" not in caught.value.message, "it is kept by what it says"
    del found[0].model.update_refusals[:]
    # deploy.md: two orchestrators on one trainer take the replicas from each other.
    took = (
        r"'other' is of another orchestrator, .*: stop it there; then 'quartet stop run' and 'quartet resume"
    )
    with pytest.raises(QuartetError, match=took):
        await policies.serving("run", 3)
    found[1].model.run_id, found[1].model.policy_version = "run", 2
    with pytest.raises(QuartetError, match="serves run 'other'") as caught:
        await policies.serving("run", 3)
    assert "of another orchestrator" not in caught.value.message, "one of them is on its way"
    found[1].model.run_id = "other"
    refused = r"adapters are served upon the model of this replica's folder"
    with pytest.raises(QuartetError, match=refused) as caught:
        await policies.serving("run", 0, adapter=True)
    assert caught.value.reason == "INVALID_REQUEST", "no replica will: nobody waits for it"
    found[1].reason = "NOT_READY"
    with pytest.raises(QuartetError, match=refused) as caught:
        await policies.serving("run", 0, adapter=True)
    assert caught.value.reason == "NOT_READY", "one of them may"
    assert caught.value.metadata["remedy"], "it answers, and is not away"
    found[0].model.adapters.add(run_id="run", policy_version=2)
    await policies.serving("run", 2, adapter=True)


@pytest.mark.parametrize("fault", ["INTERNAL", "UNAUTHENTICATED"])
async def test_a_broken_replica_matters_where_no_other_may_serve_the_run(replicas, fault):
    found, policies = replicas
    found[0].fault = fault
    with pytest.raises(QuartetError, match=r"CUDA error; .*serves its own model") as caught:
        await policies.serving("run", 3)
    assert caught.value.reason == "NOT_READY", "the other one may come to serve it"
    found[1].model.run_id, found[1].model.policy_version = "run", 3
    await policies.serving("run", 3)
    found[1].fault = "INTERNAL"
    with pytest.raises(QuartetError, match=r"can serve run 'run' .*CUDA error; .*CUDA error") as caught:
        await policies.serving("run", 3)
    assert caught.value.reason == "INTERNAL", "tried again, for it may pass"


async def test_of_what_a_replica_could_not_take_a_run_is_told_its_own_and_what_concerns_all(replicas):
    found, policies = replicas
    found[0].model.update_refusals.add(run_id="run-2", why="of another")
    found[0].model.update_refusals.add(run_id="run", why="torn bytes")
    found[1].model.update_refusals.add(why="versions are not announced: gone")
    found[0].model.adapters.add(run_id="run", policy_version=2)
    found[1].model.run_id, found[1].model.policy_version = "run", 1
    with pytest.raises(QuartetError) as caught:
        await policies.serving("run", 3, adapter=True)
    said = caught.value.message
    assert "version 2; nothing newer comes to it: torn bytes; " in said and "of another" not in said
    assert "version 1; nothing newer comes to it: versions are not announced: gone)" in said


async def test_what_each_replica_says_of_a_run(replicas):
    found, policies = replicas
    first, second = found
    first.model.adapters.add(run_id="run", policy_version=2)
    second.model.update_refusals.add(run_id="other", why="of another")
    assert [*(await policies.standing("run")).values()] == [Standing(True, ""), Standing(False, "")]
    first.model.update_refusals.add(run_id="run", why="torn bytes")
    second.model.update_refusals.add(run_id="run", why="its adapter could not be loaded: no room")
    assert [*(await policies.standing("run")).values()] == [
        Standing(True, "torn bytes"),
        Standing(False, "its adapter could not be loaded: no room"),
    ]
    first.model.out_of_service = "canary"
    second.model.refused_adapters.add(run_id="run", why="the base is another")
    assert [*(await policies.standing("run")).values()] == [
        Standing(False, "canary"),
        Standing(False, "the base is another"),
    ]
    first.fault = "NOT_READY"
    assert len(await policies.standing("run")) == 1, "one that is away says nothing"


async def test_what_an_earlier_run_of_that_name_left_is_waited_for(replicas):
    """The first version has a number and a digest: neither alone says that it is this run's."""
    found, policies = replicas
    for version, digest in ((0, b"another's"), (7, b"another's"), (7, b"ours")):
        found[0].model = ipb.GetModelResponse(run_id="run", policy_version=0, weights_digest=b"ours")
        await policies.serving("run", 0, digest=b"ours")
        found[1].model = ipb.GetModelResponse(run_id="run", policy_version=version, weights_digest=digest)
        with pytest.raises(
            QuartetError, match=f"version {version}, of an earlier run of that name"
        ) as caught:
            await policies.serving("run", 0, digest=b"ours")
        assert caught.value.reason == "NOT_READY", "one that is right is not enough"
        await policies.serving("run", 0)
        found[1].model = ipb.GetModelResponse(run_id="other", policy_version=3, weights_digest=b"another's")
        await policies.serving("run", 0, digest=b"ours")


async def test_a_version_that_the_run_has_not_published_is_an_earlier_runs_whatever_is_known_of_its_own(
    replicas,
):
    """A process that was started since may not know the digest, and would wait for this one's rollouts."""
    found, policies = replicas
    for replica in found:
        replica.model.run_id, replica.model.policy_version = "run", 15
        replica.model.weights_digest = b"another's"
    with pytest.raises(QuartetError, match="version 15, of an earlier run of that name"):
        await policies.serving("run", 0, digest=b"")
    for replica in found:
        replica.model.policy_version = 0
    await policies.serving("run", 0, digest=b"")
    found[0].model = ipb.GetModelResponse()
    found[0].model.adapters.add(run_id="run", policy_version=15, weights_digest=b"another's")
    found[0].loads = [b"ours"]
    await policies.serving("run", 0, adapter=True, digest=b"")
    assert found[0].unloaded == ["run"], "it is loaded anew"


async def test_an_adapter_of_an_earlier_run_of_that_name_is_loaded_anew(replicas):
    """Also one that is loaded and not told as served."""
    found, policies = replicas
    for told in (True, False):
        for replica in found:
            del replica.model.adapters[:]
            replica.unloaded.clear()
        if told:
            found[0].model.adapters.add(run_id="run", policy_version=0, weights_digest=b"another's")
        found[1].model.adapters.add(run_id="run", policy_version=0, weights_digest=b"ours")
        found[0].loads = [b"another's", b"ours"]
        with pytest.raises(QuartetError, match="of an earlier run of that name"):
            await policies.serving("run", 0, adapter=True, digest=b"ours")
        await policies.serving("run", 0, adapter=True, digest=b"ours")
        assert (found[0].unloaded, found[1].unloaded) == (["run", "run"], [])


async def test_an_adapter_that_loads_for_longer_than_anybody_waits_is_unloaded_once(replicas, monkeypatch):
    """Unloading ends a load under way: each attempt would begin anew, and none would come to its end."""
    found, policies = replicas

    async def load(unloads):
        with pytest.raises(QuartetError) as caught:
            await policies.serving("run", 0, adapter=True, digest=b"ours")
        assert caught.value.reason == "NOT_READY" and found[0].unloaded == ["run"] * unloads

    monkeypatch.setattr(adapter_loads, "LOAD_S", 0.1)
    found[0].is_slow = found[1].is_slow = True
    await load(1)
    await load(1)
    await policies.unserve("run")  # another run is to have its name
    await load(3)
    await load(3)
    monkeypatch.setattr(adapter_loads, "LOAD_S", 30.0)
    found[0].is_slow = found[1].is_slow = False
    for replica in found:
        replica.reason = "DEADLINE"  # which is the replica's own: it goes on with nothing
    await load(3)
    await load(4)
    monkeypatch.setattr(adapter_loads, "LOAD_S", 0.1)
    found[0].is_slow = found[1].is_slow = True
    await load(5)
    monkeypatch.setattr(adapter_loads, "LOAD_S", 30.0)
    found[0].is_slow, found[0].loads = False, [b"ours"]
    found[0].model.adapters.add(run_id="run", policy_version=0, weights_digest=b"another's")
    found[1].model.adapters.add(run_id="run", policy_version=0, weights_digest=b"ours")
    await policies.serving("run", 0, adapter=True, digest=b"ours")
    assert found[0].unloaded == ["run"] * 6, "what it came to was published again meanwhile"


async def test_an_adapter_of_an_earlier_run_goes_where_the_run_of_its_name_publishes_whole_models(replicas):
    """Where `unserve` did not get through: it would answer for ever in place of the model."""
    found, policies = replicas
    for replica in found:
        replica.model.run_id, replica.model.policy_version = "other", 3
    found[0].model.adapters.add(run_id="run", policy_version=7, weights_digest=b"another's")
    with pytest.raises(QuartetError, match="of an earlier run of that name"):
        await policies.serving("run", 0, digest=b"ours")
    assert (found[0].unloaded, found[1].unloaded) == (["run"], [])


async def test_no_replica_known_means_nobody_to_ask():
    await Policies([], ClientSecurity()).serving("run", 5)


async def test_a_replica_that_is_away_or_out_of_service_answers_nobody(replicas):
    found, policies = replicas
    found[0].fault = "INTERNAL"
    await policies.answering()
    found[1].model = ipb.GetModelResponse(run_id="run", policy_version=3, out_of_service="its canary differs")
    why = "CUDA error; .*: out of service: its canary differs"
    for asked, what in (
        (policies.answering(), "no inference replica is in service"),
        (policies.serving("run", 3), "no inference replica serves run 'run' at version 3 yet"),
    ):
        with pytest.raises(QuartetError, match=rf"{what} .*{why}") as caught:
            await asked
        assert caught.value.reason == "NOT_READY"
    await Policies([], ClientSecurity()).answering()
    away = Policies(["127.0.0.1:1"], ClientSecurity())
    with pytest.raises(QuartetError, match="yet") as caught:
        await away.serving("run", 3)
    assert not caught.value.metadata["remedy"], "nobody answers"
    await away.close()


async def test_a_replica_that_found_a_runs_adapter_wrong_does_not_answer_for_that_run(replicas):
    found, policies = replicas
    for replica in found:
        replica.model.refused_adapters.add(run_id="run", why="adapter unloaded: another model than the run's")
    with pytest.raises(QuartetError, match=r"in service .*: adapter unloaded: another model than the run's"):
        await policies.answering("run")
    await policies.answering("other")
    del found[1].model.refused_adapters[:]
    await policies.answering("run")


async def test_what_a_replica_found_wrong_by_a_canary_is_told_of_that_run_and_version_alone(replicas):
    found, policies = replicas
    found[0].fault = "INTERNAL"
    model = found[1].model
    model.run_id, model.policy_version = "run", 3
    assert not await policies.found_wrong("run", 3)
    model.out_of_service = "no numbers"
    assert await policies.found_wrong("run", 3)
    assert not await policies.found_wrong("run", 4), "it is on its way there"
    assert not await policies.found_wrong("other", 3)
    model.refused_adapters.add(run_id="adapter", why="no numbers")
    assert await policies.found_wrong("adapter", 7)


async def test_whether_a_version_has_a_canary_is_asked_of_the_trainer():
    store, tensors = WeightStore(4), {"w": Tensor("F32", (1,), bytes(4))}
    store.publish("run", 0, tensors, canary=Canary(token_ids=[1, 2], logprobs=[-1.0]))
    store.publish("run", 1, tensors)
    services = [Service(SERVICE, add_weight_service, WeightServicer(store))]
    server = await start(services, ServerConfig(), Health())
    client = TrainerClient(server.address, ClientSecurity())
    try:
        assert await client.has_canary("run", 0)
        assert not await client.has_canary("run", 1)
        with pytest.raises(QuartetError, match="run other"):
            await client.has_canary("other", 0)
    finally:
        await client.close()
        await server.stop(0)
