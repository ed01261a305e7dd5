"""What only the services know against a run is said when it is submitted, with its key (admission.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from orch_world import RUN, taught_by
from quartet.errors import QuartetError
from quartet.run.config import parse_run
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet_orchestrator import admission, policies
from quartet_orchestrator.answers import refused
from quartet_orchestrator.calls import Call, CallKind

REPLAYED = "\n[algorithm]\nrouter_replay = true\n"


@pytest.mark.parametrize("dry_run", [True, False])
async def test_what_has_no_routers_is_not_replayed(world, dry_run):
    world.trainer.has_routers = False
    async with world.orchestrator() as runs:
        with pytest.raises(QuartetError, match="the model 'm' has no routers to replay; leave it out") as no:
            await runs.submit(RUN, world.toml() + REPLAYED, dry_run=dry_run)
        assert (no.value.reason, no.value.metadata["key"]) == ("INVALID_CONFIG", "algorithm.router_replay")
        assert not runs.all()
        await runs.submit(RUN, world.toml(), dry_run=True)


async def test_a_trainer_that_says_nothing_of_routers_refuses_nothing(world):
    async with world.orchestrator() as runs:
        assert not tpb.CheckRunResponse(has_routers=world.trainer.has_routers).HasField("has_routers")
        await runs.submit(RUN, world.toml() + REPLAYED, dry_run=True)


async def test_a_batch_that_may_outgrow_the_trainer_is_told() -> None:
    """Before the run: later it cannot be made smaller."""

    async def check(*_: object) -> tpb.CheckRunResponse:
        return tpb.CheckRunResponse()

    async def told(size: int, **algorithm: float | str) -> str:
        table = "\n[algorithm]" + "".join(f"\n{key} = {value}" for key, value in algorithm.items())
        toml = f'model = "m"\nbatch_size = {size}\n[[env]]\nid = "toy"\n[sampling]\nmax_tokens = 32768{table}'
        return await admission.check_at_trainer(parse_run(toml), SimpleNamespace(check=check))

    fits = 2**30 // 7 // 32768 // 8 * 8
    assert await told(fits) == "" and await told(2 * fits, num_minibatches=2) == ""
    # A teacher's log-probabilities are carried, too.
    taught = {"kl_coef": 0.1, "reference": '{ address = "t:1" }'}
    assert await told(2**30 // 11 // 32768 // 8 * 8, **taught) == ""
    assert await told(fits, **taught) != ""
    said = await told(fits + 8)
    assert said.startswith(f"batch_size = {fits + 8} answers of sampling.max_tokens = 32768 are more than")
    assert "(1024 MiB): a run whose answers grow to that cannot go on" in said
    assert said.endswith("lower one of the two, or raise algorithm.num_minibatches (now 1)")
    larger = QuartetError("INVALID_REQUEST", "a call carries at most 9 bytes", field="batch")
    call = Call(7, CallKind.FORWARD_BACKWARD, 2)
    said = str(refused(call, larger))
    assert "the run cannot go on: let another one begin with" in said
    assert said.endswith("(a trainer of an earlier release takes less: upgrade it, then resume the run)")


@pytest.mark.parametrize(
    ("told", "key"),
    [
        ({"max_members": 3}, "rollouts_per_example = 4 is refused: the host of 'toy' .* at most 3;"),
        ({"max_members": 4}, "eval.rollouts_per_example = 5 is refused: .* 4; .* the host .max_in_flight.$"),
        ({"max_members": 3, "group_scoring": True}, "the host .rollouts_per_worker, max_in_flight.$"),
    ],
)
async def test_a_group_that_its_host_never_takes_is_refused(world, told, key):
    world.host.loaded = epb.EnvironmentInfo(**told)
    async with world.orchestrator() as runs:
        toml = world.toml().replace("num_examples = 4", "num_examples = 4\nrollouts_per_example = 5")
        with pytest.raises(QuartetError, match=key) as no:
            await runs.submit(RUN, toml, dry_run=True)
        assert no.value.reason == "INVALID_CONFIG"
        world.host.loaded = epb.EnvironmentInfo(max_members=5)
        await runs.submit(RUN, toml, dry_run=True)
        toml += "\n[[eval.env]]\nid = 'toy'\n[[eval.env]]\nid = 'two'\nrollouts_per_example = 6\n"
        with pytest.raises(QuartetError, match=r"eval\.env\.1\.rollouts_per_example = 6 is refused"):
            await runs.submit(RUN, toml, dry_run=True)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_the_policy_is_not_its_own_reference(world, dry_run):
    await world.serve("policy")
    async with world.orchestrator() as runs:
        toml = world.toml() + taught_by(world.addresses["policy"])
        with pytest.raises(QuartetError, match="it is a replica that serves this run") as no:
            await runs.submit(RUN, toml, dry_run=dry_run)
        assert (no.value.reason, no.value.metadata["key"]) == (
            "INVALID_CONFIG",
            "algorithm.reference.address",
        )
        assert not runs.all()
        # Its base model answers what names no run.
        await runs.submit(RUN, toml + "[lora]\nenabled = true\n", dry_run=True)


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        ("127.0.0.1:7001", "localhost:7001"),
        ("localhost:7001", "127.0.0.1:7001"),
        ("dns:///localhost:7001", "localhost:7001"),
        ("[::1]:7001", "[0:0:0:0:0:0:0:1]:7001"),
    ],
)
async def test_the_policy_is_not_its_own_reference_by_another_spelling(world, served, asked):
    world.addresses["policy"] = served
    async with world.orchestrator() as runs:
        with pytest.raises(QuartetError, match="it is a replica that serves this run"):
            await runs.submit(RUN, world.toml() + taught_by(asked), dry_run=True)
        for other in (asked.replace("7001", "7002"), "127.0.0.9:7001"):
            await runs.submit(RUN, world.toml() + taught_by(other), dry_run=True)


@pytest.mark.parametrize(
    ("served", "asked", "is_one"),
    [
        ("policy.example:443", "teacher.example:443", False),
        ("policy.example:443", "policy.example:443", True),
        ("policy.example:443", "10.0.0.7:443", True),
        ("10.0.0.7:443", "teacher.example:443", True),
    ],
)
async def test_two_names_of_one_gateway_are_two(monkeypatch: pytest.MonkeyPatch, served, asked, is_one):
    """It tells the services behind it apart by their names."""

    async def at_one_place(address: str) -> set[str]:
        return {address, "10.0.0.7 443"}

    async def here() -> list[SimpleNamespace]:
        return []

    monkeypatch.setattr(policies, "_places", at_one_place)
    assert await policies.Policies.has(SimpleNamespace(_configured=[served], here=here), asked) is is_one


@pytest.mark.parametrize(
    ("address", "why"),
    [("nohost", "it has no port"), ("elsewhere:1", "off loopback and the channel is")],
)
@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_teacher_that_cannot_be_called_is_refused_by_its_key(world, address, why, dry_run):
    async with world.orchestrator() as runs:
        with pytest.raises(QuartetError, match=rf" algorithm.reference.address = '{address}' .*{why}") as no:
            await runs.submit(RUN, world.toml() + taught_by(address), dry_run=dry_run)
        assert no.value.reason == "INVALID_CONFIG" and not runs.all()
        await runs.submit(RUN, world.toml() + taught_by("127.0.0.1:9"), dry_run=True)
