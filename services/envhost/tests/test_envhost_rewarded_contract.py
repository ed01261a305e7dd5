"""What "reward-service" is told by its arguments and by its service: descriptions, digests, prompts, and what
breaks the contract. Invariants by their module: rewarded/*.py."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from certificates import needs_openssl, write_certificates
from quartet.errors import QuartetError
from quartet.kit.security import ServerTls
from quartet.run.hosted import BUILT_IN
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import reward_service_pb2 as pb
from quartet_envhost.loading import BUILT_IN_ADAPTERS
from quartet_envhost.rewarded import prompts as prompts_module
from quartet_envhost.rewarded.asked import Asked
from quartet_envhost.rewarded.place import Place
from quartet_envhost.rewarded.prompts import Prompts
from rewarded_host import Rewarded
from rollout_outcomes import kind, refusal
from scripted_inference import ScriptedInference, serve_scripted
from scripted_rewards import UNKNOWN, ScriptedRewards, asks, serve_rewards

pytestmark = pytest.mark.asyncio(loop_scope="module")


ASKED = {"messages": [{"role": "user", "content": "red"}]}


async def test_what_is_built_in_has_its_adapter() -> None:
    """One list for those who name environments, one for the worker that plays them."""
    assert set(BUILT_IN_ADAPTERS) == BUILT_IN


async def test_equal_services_are_one_environment_wherever_they_are(rewarded: Rewarded) -> None:
    """environment.py 1."""
    infos = []
    for change in (None, "version", "digest", "weight", "name"):
        rewards = ScriptedRewards()
        if change in ("version", "digest"):
            setattr(rewards.described, change, "another")
        elif change == "weight":
            rewards.described.functions[0].weight = 3
        elif change == "name":
            rewards.described.functions[0].name = "size"
        service = await serve_rewards(rewards)
        own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewards, service.address)
        infos.append(await own.loaded())
        await service.stop(0)
    first = await rewarded.describe()
    same = [info.digest == first.digest for info in infos]
    assert same == [True, True, False, False, False], "what is for people alone makes no other"


async def test_without_a_digest_its_examples_tell_it_apart(rewarded: Rewarded) -> None:
    """environment.py 1."""
    digests = set()
    for word in ("red", "red", "crimson"):
        rewards = ScriptedRewards()
        rewards.described.digest = ""
        rewards.splits[epb.SPLIT_TRAIN][0] = asks(word)
        service = await serve_rewards(rewards)
        own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewards, service.address)
        digests.add((await own.loaded()).digest)
        await service.stop(0)
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "args.address = nothing: say where RewardService is served"),
        ({"address": 5}, "args.address = 5"),
        ({"address": "nowhere"}, "should be host:port"),
        ({"address": "a.example:5"}, "off loopback and the channel is plaintext"),
        ({"address": "127.0.0.1:5", "adress": 1}, "did you mean 'address'?"),
        ({"address": "127.0.0.1:5", "max_tokens": 9}, "it is a key of [sampling]"),
        ({"address": "127.0.0.1:5", "security": {"tokenfile": "x"}}, "security.token_file"),
        ({"address": "127.0.0.1:5", "security": {"token_file": "/nowhere/token"}}, "/nowhere/token"),
    ],
)
async def test_arguments_that_are_none(rewarded: Rewarded, args: dict[str, Any], said: str) -> None:
    """place.py."""
    ref = epb.EnvironmentRef(id="reward-service", args_json=json.dumps(args))
    error = await not_loaded(rewarded, ref)
    assert error.reason == "INVALID_CONFIG" and said in error.message, error.message


async def not_loaded(rewarded: Rewarded, ref: epb.EnvironmentRef | None = None) -> QuartetError:
    """Why a worker cannot load it."""
    with pytest.raises(QuartetError) as caught:
        await rewarded.loaded(ref)
    return caught.value


async def refused(rewarded: Rewarded, ref: epb.EnvironmentRef | None = None) -> QuartetError:
    """The same, as the host tells it of a worker that could not."""
    request = epb.DescribeEnvironmentRequest(environment=ref or rewarded.ref())
    return await refusal(rewarded.stub.DescribeEnvironment(request, timeout=60))


async def test_an_address_where_nobody_serves_it(rewarded: Rewarded, unused_tcp_port: int) -> None:
    """asked.py 1."""
    address = f"127.0.0.1:{unused_tcp_port}"
    error = await refused(rewarded, rewarded.ref(address=address))
    assert error.reason == "ENVIRONMENT_UNAVAILABLE"
    assert f"nothing serves RewardService at {address}" in error.message and "start it" in error.message
    other = await serve_scripted(ScriptedInference())
    error = await refused(rewarded, rewarded.ref(address=other.address))
    assert error.reason == "INVALID_CONFIG" and "does not implement RewardService" in error.message
    await other.stop(0)


@needs_openssl
async def test_a_service_whose_tls_is_another_than_the_callers(rewarded: Rewarded, tmp_path: Path) -> None:
    """asked.py 1: somebody serves it, and to start it or name it otherwise changes nothing."""
    write_certificates(tmp_path)
    tls = ServerTls(cert_file=tmp_path / "server.crt", key_file=tmp_path / "server.key")
    plain, secure = await serve_rewards(ScriptedRewards()), await serve_rewards(ScriptedRewards(), tls=tls)
    ours, others = {"ca_file": str(tmp_path / "ca.crt")}, {"ca_file": str(tmp_path / "other.crt")}
    for server, security, said in (
        (plain, ours, "TLS: it speaks plaintext, and was called with TLS; leave tls and ca_file out"),
        (secure, {}, "TLS wants ca_file"),
        (secure, others, "is of no authority that is trusted here; ca_file is to name the one"),
        (secure, {**ours, "server_name": "elsewhere"}, "certificate is for another name; call it by a name"),
    ):
        error = await not_loaded(rewarded, rewarded.ref(address=server.address, security=security))
        assert error.reason == "ENVIRONMENT_UNAVAILABLE" and said in error.message, error.message
        assert f"RewardService at {server.address} cannot be called: " in error.message
        assert "these are keys of args.security" in error.message and "start it" not in error.message
    own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, ScriptedRewards(), secure.address)
    assert (await own.describe(own.ref(security=ours))).digest
    for server in (plain, secure):
        await server.stop(0)


async def test_a_service_with_a_token(rewarded: Rewarded, tmp_path: Path) -> None:
    """place.py: given as the security of inference is."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("a-secret\n")
    wrong.write_text("a-guess\n")
    rewards = ScriptedRewards()
    service = await serve_rewards(rewards, token_file=right)
    own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewards, service.address)
    info = await own.describe(own.ref(security={"token_file": str(right)}))
    assert info.digest == (await rewarded.describe()).digest
    error = await refused(own, own.ref(security={"token_file": str(wrong)}))
    assert error.reason == "INVALID_CONFIG" and "args.security.token_file" in error.message
    assert "secret" not in error.message and "guess" not in error.message
    await service.stop(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_size": 0}, "train_size is 0"),
        ({"train_size": 2**32}, "train_size is 4294967296; it should be 4194304 at most"),
        ({"eval_size": 2**63}, "eval_size is 9223372036854775808; it should be"),
        ({"functions": []}, "names no reward function"),
        ({"functions": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}, "2 reward functions are called 'a'"),
        ({"functions": [{"weight": 1}]}, "empty name"),
        ({"functions": [{"name": "a", "weight": math.nan}]}, "the weight of 'a' is nan"),
        ({"functions": [{"name": "a", "weight": -math.inf}]}, "the weight of 'a' is -inf"),
        ({"digest": "x" * 65}, "its digest has 65 characters"),
    ],
)
async def test_a_description_that_breaks_the_contract(own: Rewarded, change: Any, said: str) -> None:
    """described.py."""
    for name, value in change.items():
        own.rewards.described.ClearField(name)
        own.rewards.described.MergeFrom(pb.DescribeRewardsResponse(**{name: value}))
    error = await not_loaded(own)
    assert error.reason == "ENVIRONMENT_UNAVAILABLE"
    assert f"RewardService at {own.address} breaks its contract" in error.message and said in error.message


#: Prompts that break it, and what is said of each.
BROKEN: list[tuple[pb.RewardPrompt, str]] = [
    (pb.RewardPrompt(key="k"), "neither messages nor tokens"),
    (pb.RewardPrompt(key="k", messages={}), "without a message"),
    (pb.RewardPrompt(key="k", tokens={}), "of no token"),
    (
        pb.RewardPrompt(key="k", tokens={"token_ids": [1], "tail_messages": ASKED["messages"]}),
        "messages after its tokens",
    ),
    (pb.RewardPrompt(messages=ASKED), "has 0 characters"),
    (pb.RewardPrompt(messages=ASKED, key="k" * 65), "has 65 characters"),
    (pb.RewardPrompt(messages=ASKED, key="k", template_settings="[]"), "template_settings"),
    (pb.RewardPrompt(messages=ASKED, key="k", data_json="{"), "data_json of train prompt 2 is no JSON"),
    (pb.RewardPrompt(messages=ASKED, key="k", data_json="[]"), "no JSON object"),
    (
        pb.RewardPrompt.FromString(pb.RewardPrompt(messages=ASKED, key="k").SerializeToString() + UNKNOWN),
        "RewardPrompt, field 100",
    ),
]


async def test_a_prompt_that_breaks_the_contract(own: Rewarded) -> None:
    """described.py: at once where it is looked at, and else it fails what asked for it."""
    await own.describe()
    for prompt, said in BROKEN:
        own.rewards.splits[epb.SPLIT_TRAIN][2] = prompt
        error = await not_loaded(own)
        assert error.reason == "ENVIRONMENT_UNAVAILABLE"
        assert "prompt 2" in error.message and said in error.message, error.message
        (rollout,) = await own.run(2, max_retries=1)
        assert kind(rollout) == "ENVIRONMENT" and said in rollout.failure.message, rollout.failure
    assert not own.policy.requests


async def test_a_service_that_has_fewer_prompts_than_it_said(own: Rewarded) -> None:
    await own.describe()
    del own.rewards.splits[epb.SPLIT_TRAIN][3:]
    (rollout,) = await own.run(3)
    assert kind(rollout) == "ENVIRONMENT" and "it sent 0 train prompts" in rollout.failure.message


async def test_a_million_prompts_are_not_held(own: Rewarded) -> None:
    """prompts.py 1: neither by the worker that loads them nor by what it asks for."""
    own.rewards.described.train_size = own.rewards.described.eval_size = 1_000_000
    own.rewards.prompt = lambda index: asks(f"word {index}")
    info = await own.describe()
    assert info.train_size == 1_000_000
    assert sum(page.count for page in own.rewards.pages) == 2 * 64, "a digest of 64 of each split"
    (rollout,) = await own.run(999_999, messages_of_members=1)
    assert rollout.messages[0].content == "word 999999"
    own.rewards.pages.clear()
    tasks = await own.tasks(start=500_000, count=600)
    assert [task.key for task in tasks[:2]] == ["key of word 500000", "key of word 500001"] and len(
        tasks
    ) == 600
    assert max(page.count for page in own.rewards.pages) == prompts_module.PAGE


async def test_what_is_kept_of_prompts_is_bounded(
    rewarded: Rewarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prompts.py 1 and 2."""
    rewards = ScriptedRewards()
    rewards.prompt = lambda index: asks(f"word {index:09}")
    size = rewards.prompt(0).ByteSize()
    monkeypatch.setattr(prompts_module, "KEPT_BYTES", 10 * size)
    service = await serve_rewards(rewards)
    asked = Asked(Place(address=service.address), lambda now: None)
    prompts = Prompts(asked)
    deadline = asyncio.get_running_loop().time() + 60
    train = epb.SPLIT_TRAIN
    got = await asyncio.gather(*(prompts.get(train, 7, deadline) for _ in range(20)))
    assert len(rewards.pages) == 1 and len({id(one) for one in got}) == 1, "a group asks once"
    for index in range(1000):
        await prompts.get(train, index % 100, deadline)
        await prompts.get(train, 7, deadline)
    assert len(prompts._kept) == 10 and prompts._kept_bytes == 10 * size and not prompts._coming
    assert sum(page.start == 7 for page in rewards.pages) == 1, "what is asked for again stays"
    assert [one async for one in prompts.listed(train, 0, 500)] and len(prompts._kept) == 10
    await asked.close()
    await service.stop(0)


async def test_more_than_a_message_of_tasks_is_asked_for_in_pieces(own: Rewarded) -> None:
    own.rewards.described.train_size = 3000
    own.rewards.prompt = lambda index: asks(f"{index} " * 10_000)
    error = await refusal(
        own.stub.GetTasks(
            epb.GetTasksRequest(environment=own.ref(), count=3000, include_data=True), timeout=60
        )
    )
    assert (error.reason, error.metadata.get("field")) == ("INVALID_REQUEST", "count"), error
    last = own.rewards.pages[-1]
    assert last.start + last.count < 500, "what does not fit is not fetched"
    assert len(await own.tasks(count=3000)) == 3000, "of which the keys fit, page by page"
    own.rewards.page_bytes = 8 << 20
    error = await refusal(
        own.stub.GetTasks(epb.GetTasksRequest(environment=own.ref(), count=300), timeout=60)
    )
    assert error.reason == "ENVIRONMENT_UNAVAILABLE" and own.address in error.message, error
