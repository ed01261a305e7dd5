"""Prompts and rewards for Quartet, served by a program of a page: plain grpcio and the generated stubs.

python examples/reward_service/server.py [--address 127.0.0.1:50060]

The task is to write short texts backwards. Whatever a reward function raises fails the rollouts that it was
asked to score, and the run says so; nothing is made 0.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import string
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher

import grpc
from quartet.v1 import reward_service_pb2 as pb
from quartet.v1.envhost_service_pb2 import SPLIT_EVAL, SPLIT_TRAIN
from quartet.v1.reward_service_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
OPEN, CLOSE = "<reversed_text>", "</reversed_text>"


def texts(seed: str, count: int) -> list[str]:
    """The same ones whenever this program is started: a run that is resumed goes on with them."""
    rng = random.Random(seed)
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 8))) for _ in range(count)]


TEXTS = {SPLIT_TRAIN: texts("train", 2000), SPLIT_EVAL: texts("eval", 200)}


def similarity(text: str, answer: str) -> float:
    """How alike the answer is to the text backwards, in [0, 1]; nothing without its tags."""
    if not (answer.startswith(OPEN) and answer.endswith(CLOSE)):
        return 0.0
    return SequenceMatcher(None, answer[len(OPEN) : -len(CLOSE)], text[::-1]).ratio()


def exact(text: str, answer: str) -> float:
    """Whether it is right."""
    return float(answer == f"{OPEN}{text[::-1]}{CLOSE}")


# Each with its weight in the reward; one of weight 0 is a metric, and only shown.
FUNCTIONS = {similarity: 1.0, exact: 0.0}


class Rewards(RewardServiceServicer):
    """The three calls."""

    def DescribeRewards(self, request, context):
        """How many prompts there are, and of what the reward consists."""
        functions = [{"name": one.__name__, "weight": weight} for one, weight in FUNCTIONS.items()]
        return pb.DescribeRewardsResponse(
            train_size=len(TEXTS[SPLIT_TRAIN]),
            eval_size=len(TEXTS[SPLIT_EVAL]),
            functions=functions,
            # By it a run notices that prompts or rewards are other ones than those it began with.
            digest="reverse 1",
        )

    def GetPrompts(self, request, context):
        """The prompts from a number on: such short ones fit into a message, however many are asked for."""
        response = pb.GetPromptsResponse()
        for text in TEXTS[request.split][request.start : request.start + request.count]:
            prompt = response.prompts.add(key=hashlib.sha256(text.encode()).hexdigest()[:16])
            prompt.messages.messages.add(role="system", content=SYSTEM)
            prompt.messages.messages.add(role="user", content=text)
        return response

    def ScoreGroup(self, request, context):
        """The rewards of the answers to one prompt, in their order."""
        text = TEXTS[request.split][request.index]
        response = pb.ScoreGroupResponse()
        for completion in request.completions:
            reward = response.rewards.add()
            for function in FUNCTIONS:
                reward.scores.add(value=function(text, completion.message.content))
        return response


def main() -> None:
    """Serve until somebody presses Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:50060")
    address = parser.parse_args().address
    # Else two servers may share an address, and answer in turns.
    options = [("grpc.so_reuseport", 0)]
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=options)
    add_RewardServiceServicer_to_server(Rewards(), server)
    server.add_insecure_port(address)
    server.start()
    print(f"serving {len(FUNCTIONS)} reward functions at {address}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
