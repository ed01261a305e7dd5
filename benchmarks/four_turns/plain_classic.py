"""Classic Verifiers by itself: in this process with the stub policy, or its environment server with the stub
policy behind HTTP.

    python plain_classic.py alone|server IN_FLIGHT [POLICY_URL]
"""

import asyncio
import multiprocessing
import os
import socket
import sys

import rounds
import verifiers as vf
from policy import LOGPROBS, PROMPT, SAMPLED, TEXT
from verifiers.legacy.serve.client.zmq_env_client import ZMQEnvClient
from verifiers.legacy.serve.server.zmq_env_server import ZMQEnvServer
from verifiers.types import ClientConfig, Response, ResponseMessage, ResponseTokens, Usage

ENVIRONMENT = "four_turns_classic"


class Stub(vf.Client):
    """Answers without a network."""

    def __init__(self):
        super().__init__(object())

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        steps = kwargs["state"]["trajectory"]
        earlier = steps[-1]["tokens"] if steps else None
        tokens = [*earlier["prompt_ids"], *earlier["completion_ids"], *PROMPT] if earlier else PROMPT
        return Response(
            id="",
            created=0,
            model=model,
            usage=Usage(
                prompt_tokens=len(tokens),
                completion_tokens=len(SAMPLED),
                reasoning_tokens=0,
                total_tokens=len(tokens) + len(SAMPLED),
            ),
            message=ResponseMessage(
                content=TEXT,
                finish_reason="stop",
                is_truncated=False,
                tokens=ResponseTokens(
                    prompt_ids=tokens,
                    prompt_mask=[0] * len(tokens),
                    completion_ids=SAMPLED,
                    completion_mask=[1] * len(SAMPLED),
                    completion_logprobs=LOGPROBS,
                ),
            ),
        )

    # The rest of the interface talks to providers; get_response, which is given here, is all that calls it.
    def setup_client(self, config):
        raise NotImplementedError

    to_native_tool = to_native_prompt = get_native_response = setup_client
    raise_from_native_response = from_native_response = close = setup_client


async def alone(in_flight: int) -> None:
    """Verifiers in this process."""
    env = vf.load_environment(ENVIRONMENT)
    rows, client = env.get_dataset(), Stub()

    async def run(index: int) -> None:
        out = await env.run_rollout(rows[index], client, "policy", {}, state_columns=["trajectory"])
        assert out["reward"] == 1.0 and len(out["trajectory"]) == 4, out["error"]

    await rounds.serve(run, in_flight)


async def server(in_flight: int, policy_url: str) -> None:
    """Verifiers' environment server with one worker, asked by its own client."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=ZMQEnvServer.run_server,
        args=(ENVIRONMENT,),
        kwargs={"address": address, "num_workers": 1, "log_level": "ERROR", "console_logging": False},
    )
    process.start()
    try:
        rows = vf.load_environment(ENVIRONMENT).get_dataset()
        client = ZMQEnvClient(address=address)
        await client.wait_for_server_startup(timeout=120)
        config = ClientConfig(api_base_url=policy_url, api_key_var="POLICY_KEY")

        async def run(index: int) -> None:
            out = await client.run_rollout(rows[index], config, "policy", {}, state_columns=["trajectory"])
            assert out["reward"] == 1.0, out["error"]

        await rounds.serve(run, in_flight)
        await client.close()
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    os.environ["POLICY_KEY"] = "none"
    asyncio.run(alone(int(sys.argv[2])) if sys.argv[1] == "alone" else server(int(sys.argv[2]), sys.argv[3]))
