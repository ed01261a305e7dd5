"""Classic environments as the documentation of Verifiers writes them; nothing here knows of this project.

`kind` says which: a stateful tool, tools of an MCP server that speaks stdio, code in Verifiers' own sandbox,
conversations that fork, a parser with its format reward, or a judge at an OpenAI-compatible endpoint.
"""

import os
import sys

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from verifiers.envs.experimental.mcp_env import MCPEnv

# A picture of one dot.
IMAGE = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="
HERE = os.path.dirname(os.path.abspath(__file__))


def questions(*pairs):
    return Dataset.from_list([{"question": question, "answer": answer} for question, answer in pairs])


def exact(parser, completion, answer) -> float:
    return float((parser.parse_answer(completion) or "") == answer)


class NotebookEnv(vf.StatefulToolEnv):
    """A notebook for each rollout, which its tool never sees the name of."""

    def __init__(self, **kwargs):
        super().__init__(tools=[], max_turns=4, **kwargs)
        self.add_tool(self.note, args_to_skip=["notebook"])

    async def setup_state(self, state, **kwargs):
        state["notebook"] = []
        return await super().setup_state(state, **kwargs)

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "notebook": state["notebook"]}

    async def note(self, line: str, notebook: list) -> str:
        """Write a line into the notebook.

        Args:
            line: What to write.
        """
        notebook.append(line)
        return f"{len(notebook)} lines: {', '.join(notebook)}"


async def noted(state) -> float:
    return float(len(state["notebook"]))


class ForgetfulEnv(vf.MultiTurnEnv):
    """Every other turn starts over from the question, so the conversation forks there."""

    async def get_prompt_messages(self, state):
        if len(state["trajectory"]) == 2:
            return [*state["prompt"], vf.UserMessage(content="from the start, please")]
        return await super().get_prompt_messages(state)

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="go on")]


def load_environment(kind: str = "parser", judge_url: str = "", judge_model: str = "", **kwargs):
    parser = vf.XMLParser(["think", "answer"], answer_field="answer")
    rubric = vf.Rubric(funcs=[exact, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser)
    if kind == "parser":
        rubric.add_metric(by_letter)
        data = questions(("What is 2 + 2?", "4"), ("What is 3 + 3?", "6"))
        system = f"Think, then answer.\n{parser.get_format_str()}"
        return vf.SingleTurnEnv(dataset=data, system_prompt=system, parser=parser, rubric=rubric)
    if kind == "image":
        asks = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
        data = Dataset.from_list([{"prompt": [{"role": "user", "content": asks}], "answer": "a dot"}])
        return ForgetfulEnv(dataset=data, rubric=vf.Rubric(funcs=[turns_taken]), max_turns=2)
    if kind == "stateful":
        return NotebookEnv(dataset=questions(("Note two lines.", "")), rubric=vf.Rubric(funcs=[noted]))
    if kind == "mcp":
        server = {"name": "town", "command": sys.executable, "args": [os.path.join(HERE, "town.py")]}
        data = questions(("How many live in Ulm?", "120000"))

        def right(completion, answer) -> float:
            return float(answer in completion[-1]["content"])

        return MCPEnv(mcp_servers=[server], dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=4)
    if kind == "sandbox":
        return vf.PythonEnv(
            dataset=questions(("Compute.", "")), rubric=vf.Rubric(funcs=[exact], parser=parser)
        )
    if kind == "forks":
        turns = vf.Rubric(funcs=[turns_taken])
        return ForgetfulEnv(dataset=questions(("Tell me.", "")), rubric=turns, max_turns=4)
    if kind == "judge":
        client = AsyncOpenAI(
            base_url=judge_url, api_key=os.environ["JUDGE_API_KEY"], max_retries=0, timeout=20
        )
        judged = vf.JudgeRubric(
            judge_client=client, judge_model=judge_model, judge_sampling_args={"max_tokens": 8}
        )

        async def heard(judge, prompt, completion, answer, state) -> float:
            return float(isinstance(await judge(prompt, completion, answer, state), str))

        judged.add_reward_func(heard)
        return vf.SingleTurnEnv(dataset=questions(("ab", "ba")), rubric=judged)
    raise ValueError(f"no kind {kind!r}")


def by_letter(answer) -> dict:
    """No metric, although it is meant to be one."""
    return {letter: 1.0 for letter in answer}


async def turns_taken(state) -> float:
    return float(len(state["trajectory"]))
