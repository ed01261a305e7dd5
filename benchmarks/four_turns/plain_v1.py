"""Verifiers 0.4 by itself: in this process with the stub policy, or its environment server with the stub
policy behind HTTP.

    python plain_v1.py alone|server IN_FLIGHT [POLICY_URL]
"""

import asyncio
import multiprocessing
import os
import sys

import rounds
import verifiers.v1 as vf
from policy import LOGPROBS, PROMPT, SAMPLED, TEXT
from verifiers.v1.clients.client import Client
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.types import AssistantMessage, Response, TurnTokens, Usage
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

AGENT = {"harness": {"id": "chat-in-process"}, "runtime": {"type": "subprocess"}}


def config():
    """The environment, with the shortest harness there is."""
    return resolve_env_config({"taskset": {"id": "four-turns"}, "agent": AGENT})


class Stub(Client):
    """Answers without a network."""

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None):
        earlier = turn.previous_renderer_token_ids()
        tokens = [*earlier[0], *earlier[1], *PROMPT] if earlier else list(PROMPT)
        response = Response(
            id="",
            created=0,
            model=body["model"],
            message=AssistantMessage(content=TEXT),
            finish_reason="stop",
            usage=Usage(prompt_tokens=len(tokens), completion_tokens=len(SAMPLED)),
            tokens=TurnTokens(
                prompt_ids=tokens,
                completion_ids=SAMPLED,
                completion_logprobs=LOGPROBS,
                bridged=earlier is not None,
            ),
        )
        response.raw = serialize_completion(response, body["model"])
        return response


class Interception(InterceptionServer):
    """Verifiers' own, with a live client."""

    def _client(self, config):
        return Stub()


async def alone(in_flight: int) -> None:
    """Verifiers in this process."""
    env = load_environment(config())
    tasks = list(env.taskset)
    unused = vf.TrainClientConfig(base_url="http://unused/v1")
    context = vf.ModelContext(model="policy", client=unused, sampling=vf.SamplingConfig())

    async def run(index: int) -> None:
        episode = await env.run_slot(env.slots(tasks[index])[0], context)
        assert episode.ok and episode.traces[0].reward == 1.0, episode.errors

    async with env.shared_tools() as shared, Interception() as interception:
        env._shared_tools, env._interception = shared, interception
        await env.start()
        await rounds.serve(run, in_flight)
        await env.stop()


async def server(in_flight: int, policy_url: str) -> None:
    """Verifiers' environment server, asked by its own client."""
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    process = context.Process(
        target=EnvServer.run_server,
        args=(addresses,),
        kwargs={"config": config(), "address": "tcp://127.0.0.1:0"},
    )
    process.start()
    try:
        tasks = [task.data.model_dump(mode="json") for task in load_environment(config()).taskset]
        client = EnvClient(addresses.get(timeout=120))
        await client.wait_for_server_startup()
        policy = vf.EvalClientConfig(base_url=policy_url, api_key_var="POLICY_KEY")

        async def run(index: int) -> None:
            episode = await client.run(policy, "policy", vf.SamplingConfig(), tasks[index])
            assert episode.ok and episode.traces[0].reward == 1.0, episode.errors

        await rounds.serve(run, in_flight)
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    os.environ["POLICY_KEY"] = "none"
    asyncio.run(alone(int(sys.argv[2])) if sys.argv[1] == "alone" else server(int(sys.argv[2]), sys.argv[3]))
