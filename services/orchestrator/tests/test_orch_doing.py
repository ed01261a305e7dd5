"""What a run does or waits for, and who runs it: for whoever asks (runs.py, roll_call.py)."""

from __future__ import annotations

import asyncio

import pytest
from orch_world import RUN, assert_complete, notes, serving
from quartet.errors import QuartetError
from quartet.kit.build import build_of
from quartet.kit.call import unary
from quartet.run.config import parse_run
from quartet.run.evaluation import parse_evaluation
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.envhost_service_pb2 import EnvironmentInfo
from quartet_orchestrator import admission, keeping_up, roll_call, trainer_client, training
from quartet_orchestrator.activity import named


async def says(runs, what, run_id=RUN):
    """Once the run says so."""
    async with asyncio.timeout(60):
        while what not in (doing := runs.status(run_id).doing):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return doing


async def test_a_run_says_who_is_away_and_for_how_long(world):
    """runs.py 5, trouble.py 2"""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        await runs.submit("next", world.toml(steps=1), dry_run=False)
        assert (
            runs.status("next").doing == "waits for its turn behind run 'run': stop it, or wait for its end"
        )
        while runs.get(RUN).state.step < 1:
            await runs.get(RUN).changed()
        assert runs.status(RUN).doing, "it does something"
        await world.kill("trainer")
        doing = await says(runs, "the trainer is away, waiting for it: ")
        assert "see to it, or the run stops, resumable, after patience_seconds = 20)" in doing
        await world.serve("trainer")
        await world.kill("host")
        await says(runs, "the environment host is away")
        await world.serve("host")
        assert_complete(world, await world.rest(runs), steps=8)
        assert runs.status(RUN).doing == "" and runs.get(RUN).run().doing == "", "and nothing once it rests"
        await world.rest(runs, "next")


async def test_a_run_says_that_inference_does_not_serve_its_version(world, monkeypatch):
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    monkeypatch.setattr(keeping_up, "SHOWN_AFTER_S", 0.1)
    await world.serve("policy")
    world.trainer.delay_s = 0.05
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8, evals=0), dry_run=False)
        while runs.get(RUN).state.step < 1:
            await runs.get(RUN).changed()
        await world.kill("policy")
        assert "see to it, or the run stops, resumable" in await says(
            runs, "waits for inference to serve version"
        )
        await world.serve("policy")
        assert_complete(world, await world.rest(runs), steps=8)


async def test_why_a_version_is_refused_is_said_once(world, monkeypatch):
    """The first one: what waits for it and what looks after it both see the reason."""
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    monkeypatch.setattr(keeping_up, "SHOWN_AFTER_S", 0.1)

    async def refuses(self, request, context):
        return ipb.GetModelResponse(
            update_refusals=[ipb.UpdateRefusal(why="version 0 could not be taken: tensor w")]
        )

    monkeypatch.setattr("orch_fakes.FakePolicy.GetModel", refuses)
    await world.serve("policy")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        doing = await says(runs, "waits for inference to serve version 0")
        assert doing.count("tensor w") == 1 and "the model is away" not in doing


async def test_a_run_says_that_its_environment_fails(world):
    world.host.failing_tasks = set(range(50))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        doing = await says(runs, "groups in a row of environment 'toy' failed, the last as failed:")
        assert "broken" in doing and "10 stop the run, resumable" in doing
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED


async def test_what_the_trainer_refuses_is_refused_when_it_is_submitted(world):
    """And by a dry run; nothing is left of it."""
    refused = QuartetError(
        "INVALID_CONFIG",
        "custom_loss = 'mine' is refused: its losses are soft; start the trainer with losses.mine",
        key="custom_loss",
        value="mine",
    )
    toml = world.toml(steps=1) + '\n[algorithm]\nloss = "custom"\ncustom = "mine"\ncustom_args.tau = 0.5\n'
    async with world.orchestrator() as runs:
        world.trainer.refuses = refused
        for dry_run in (True, False):
            with pytest.raises(QuartetError) as caught:
                await runs.submit(RUN, toml, dry_run=dry_run)
            said = "algorithm.custom = 'mine' is refused by the trainer: its losses are soft; start the"
            assert caught.value.reason == "INVALID_CONFIG" and caught.value.message.startswith(said)
            assert caught.value.metadata["key"] == "algorithm.custom"
        assert not runs.all() and not world.host.described, "before an environment is loaded"
        world.trainer.refuses = None
        await runs.submit(RUN, toml, dry_run=False)
        assert world.trainer.checked[-1].custom_loss == "mine"
        assert world.trainer.checked[-1].custom_args == '{"tau": 0.5}'
        assert world.trainer.checked[-1].spec.base_model == "m"
        await world.rest(runs)


class Described:
    """A host that describes each environment as it was given here."""

    def __init__(self, **sizes):
        self._infos = {one: EnvironmentInfo(id=one, **of) for one, of in sizes.items()}

    async def describe(self, environment):
        return self._infos[environment.id]


async def test_an_environment_without_tasks_is_refused_and_one_that_never_ends_is_taken(world):
    hosts = Described(
        endless={"infinite": True, "eval_size": 1}, empty={"eval_size": 1}, only={"train_size": 1}
    )
    evaluated_on = '\n[[eval.env]]\nid = "only"'

    async def described(env, **more):
        return await admission.describe_environments(parse_run(world.toml(env=env, **more)), hosts)

    assert [one.id for one in (await described("endless")).train] == ["endless"]
    with pytest.raises(QuartetError, match=r"env\.id = empty is refused: it has no training examples"):
        await described("empty")
    without = r"eval\.num_examples = 4 is refused: 'only' has no evaluation examples; set it to 0"
    with pytest.raises(QuartetError, match=f"{without}, or give eval.env others"):
        await described("only")
    assert (await described("only", evals=0)).eval == [], "nothing is evaluated"
    config = parse_run(world.toml(env="endless") + evaluated_on)
    with pytest.raises(QuartetError, match=f"{without}, or remove 'only' from eval.env"):
        await admission.describe_environments(config, hosts)
    asked = parse_evaluation('num_examples = 1\n[[env]]\nid = "only"')
    trials = asked.trials([], config.sampling)
    with pytest.raises(QuartetError, match=r"env\.id = only is refused: it has no evaluation examples"):
        await admission.describe_trials(trials, hosts)


@pytest.mark.parametrize("reason", ["NOT_IMPLEMENTED", "INTERNAL"])
async def test_a_trainer_that_cannot_say_is_no_reason_to_refuse(world, reason):
    world.trainer.refuses = QuartetError(reason, "no method CheckRun")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=1), dry_run=False)
        assert_complete(world, await world.rest(runs), steps=1)
        assert not [one for one in await notes(runs) if "when the run was submitted" in one], "it was there"


async def test_a_trainer_that_is_away_is_waited_for_and_that_is_said(world):
    async with world.orchestrator() as runs:
        await world.kill("trainer")
        await runs.submit(RUN, world.toml(steps=1), dry_run=False)
        await world.serve("trainer")
        assert_complete(world, await world.rest(runs), steps=1)
        assert "was away when the run was submitted" in (await notes(runs))[0]


async def test_a_trainer_that_takes_long_to_say_is_not_called_away(world, monkeypatch):
    async def looks(request, context):
        await asyncio.sleep(30)

    monkeypatch.setattr(trainer_client, "CHECK_S", 0.3)
    monkeypatch.setattr(admission, "CHECK_S", 0.3)
    async with world.orchestrator() as runs:
        await world.kill("trainer")
        world.trainer.CheckRun = looks
        await world.serve("trainer")
        await runs.submit(RUN, world.toml(steps=1), dry_run=False)
        assert_complete(world, await world.rest(runs), steps=1)
        said = (await notes(runs))[0]
        assert "had not answered within 0.3 s when the run was submitted" in said and "away" not in said


async def test_what_does_not_fit_an_adapter_is_told_by_the_key_of_the_run(world):
    world.trainer.refuses = QuartetError(
        "INVALID_CONFIG",
        "lora.rank = 16 is refused: the run begins with the adapter in /a: it has r = 8; set that",
        key="lora.rank",
        value=16,
    )
    async with world.orchestrator() as runs:
        with pytest.raises(QuartetError) as caught:
            await runs.submit(RUN, world.toml(steps=1), dry_run=True)
    assert caught.value.metadata["key"] == "lora.r"
    assert caught.value.message.startswith("lora.r = 16 is refused by the trainer: the run begins with the")


async def test_a_resumed_run_is_refused_while_its_cause_is_there(world):
    world.trainer.model_missing = True
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=1), dry_run=False)
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_FAILED
        world.trainer.refuses = QuartetError(
            "INVALID_CONFIG", "base_model: there is no folder /m; create it", key="base_model", value="m"
        )
        with pytest.raises(
            QuartetError, match="model = 'm' is refused by the trainer: there is no folder /m"
        ):
            await runs.resume(RUN)
        assert runs.status(RUN).phase == pb.RUN_PHASE_FAILED
        world.trainer.refuses, world.trainer.model_missing = None, False
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=1)


async def test_the_roll_call_tells_builds_and_who_does_not_answer(world, monkeypatch):
    """roll_call.py 1-3"""
    monkeypatch.setattr(roll_call, "ASK_S", 20.0)
    await world.serve("policy")
    async with serving(world) as stub:
        quiet = await unary(stub.ListRuns, pb.ListRunsRequest(), timeout_s=20)
        assert not quiet.services, "only where somebody asks"
        await world.kill("host")
        asked = await unary(stub.ListRuns, pb.ListRunsRequest(services=True), timeout_s=20)
        found = {one.service: one for one in asked.services}
        assert list(found) == ["orchestrator", "trainer", "envhost", "inference"]
        own = build_of("quartet_orchestrator")
        one = found["orchestrator"]
        assert (one.release, one.sdk_build, one.build, one.address) == (own.release, own.sdk, own.own, "")
        assert (
            found["trainer"].sdk_build == own.sdk and found["trainer"].address == world.addresses["trainer"]
        )
        # The fakes never say that they are ready.
        assert not found["trainer"].ready and not found["trainer"].error
        assert "Connection refused" in found["envhost"].error and not found["envhost"].release
        monkeypatch.setattr(roll_call, "MAX_SERVICES", 2)
        few = await unary(stub.ListRuns, pb.ListRunsRequest(services=True), timeout_s=20)
        assert [one.service for one in few.services] == ["orchestrator", "trainer"]


async def test_a_service_that_is_silent_holds_up_nobody(world, monkeypatch):
    """roll_call.py 1: the same for one that accepts the connection and says nothing."""
    monkeypatch.setattr(roll_call, "ASK_S", 0.3)
    async with serving(world) as stub:
        await world.kill("host")
        host, port = world.addresses["host"].split(":")
        silent = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), host, int(port))
        async with silent, asyncio.timeout(40):  # of the minute that it is silent
            asked = await unary(stub.ListRuns, pb.ListRunsRequest(services=True), timeout_s=60)
        assert {one.service: bool(one.error and not one.release) for one in asked.services}["envhost"]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (["a"], "run 'a'"),
        (["a", "b", "c"], "runs 'a', 'b', 'c'"),
        (list("abcde"), "runs 'a', 'b', 'c' and 2 more"),
    ],
)
def test_runs_that_are_waited_for_are_named_on_one_line(runs, said):
    assert named(runs) == said
