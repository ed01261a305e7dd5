"""The bridge between the `gepa` library, which runs in a thread, and rollouts, which run on the event loop.

1. A candidate is scored by rollouts only: a rollout that fails is tried again, and one that goes on failing
   ends the optimisation (which can be resumed), because a prompt is not worth 0 for what broke.
2. What ends it is kept in `broken`, whatever the library makes of it.
3. A prompt is played once on a validation example: its rollouts are in validation.jsonl, each once it has
   ended, from which an optimisation that goes on takes them. (The library itself would play the first prompt
   again.)
4. An answer of the teacher that has no whole prompt is none, which is said: the library asks once more, and
   then takes the next step. NO_PROMPTS in a row end the optimisation.
5. Candidates are called by their number in results.jsonl, over a resume, too.
6. While rollouts are played, a line says how many have ended, at most every TOLD_SECONDS.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from gepa.core.adapter import EvaluationBatch
from gepa.core.callbacks import IterationStartEvent
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from quartet.cli.eval.board import Board
from quartet.cli.eval.config import Trial
from quartet.cli.eval.player import Player
from quartet.cli.eval.rollouts import play
from quartet.cli.eval.rows import failure_kind, result_row
from quartet.cli.gepa.policies import Prompted, ask
from quartet.cli.outputs import Row, append_line, recover_lines
from quartet.config import ConfigError
from quartet.counted import counted
from quartet.errors import QuartetError
from quartet.v1.envhost_service_pb2 import ModelAnswer
from quartet.v1.rollout_pb2 import Rollout, Task

T = TypeVar("T")

COMPONENT = "system_prompt"
VALIDATION = "validation.jsonl"
#: Beyond the tries inside the host.
ATTEMPTS = 3
#: Validation examples may be hundreds, and each take minutes.
TOLD_SECONDS = 10.0
#: Of five steps: a teacher with too few tokens for its thoughts would else waste all rollouts.
NO_PROMPTS = 10


class NoPrompt(Exception):
    """What the teacher answered has no whole prompt."""


class Adapter:
    """GEPA's adapter: examples are (split, index)."""

    #: The library proposes with its own template and the reflecting model.
    propose_new_texts = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: Any,
        trial: Trial,
        tasks: Mapping[str, Sequence[Task]],
        policy: Prompted,
        teacher: Player,
        teacher_name: str,
        state_columns: Sequence[str],
        reflection_max_tokens: int,
        board: Board,
        folder: Path,
    ) -> None:
        self._loop, self._host, self._trial, self._tasks = loop, host, trial, tasks
        self._policy, self._teacher, self._teacher_name = policy, teacher, teacher_name
        self._columns, self._max_tokens, self._board = state_columns, reflection_max_tokens, board
        self._candidates: list[str] = []
        self._no_prompts = 0
        self._told, self._wanted = 0.0, 0
        self._file = folder / VALIDATION
        self._validated: dict[tuple[str, int], Row] = {
            (one["prompt"], one["index"]): one["row"] for one in recover_lines(self._file)
        }
        self.broken: QuartetError | ConfigError | None = None

    def evaluate(
        self, batch: list[tuple[str, int]], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Row, Row]:
        """Rollouts of the examples under a candidate's prompt."""
        rows = self._call(self._play(batch, candidate[COMPONENT]))
        scores = [float(row["reward"]) for row in rows]
        name, mean = self._named(candidate[COMPONENT], batch[0][0]), sum(scores) / len(scores)
        self._board.say(f"{name}: reward {mean:.3f} on {counted(len(scores), f'{batch[0][0]} example')}")
        return EvaluationBatch(outputs=rows, scores=scores, trajectories=rows if capture_traces else None)

    def on_iteration_start(self, event: IterationStartEvent) -> None:
        """The library begins a step, with these candidates."""
        self._candidates = [one[COMPONENT] for one in event["state"].program_candidates]

    def _named(self, prompt: str, split: str) -> str:
        if split == "eval":  # the next one that is kept
            return f"candidate {len(self._candidates)}"
        return f"candidate {self._candidates.index(prompt)}" if prompt in self._candidates else "a new prompt"

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],
        eval_batch: EvaluationBatch[Row, Row],
        components_to_update: list[str],
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """What the teacher reads of each example."""
        records = [self._record(row) for row in eval_batch.outputs]
        return dict.fromkeys(components_to_update, records)

    def _record(self, row: Row) -> Row:
        asked = next((one["content"] for one in row["prompt"] if one["role"] == "user"), "")
        record = {
            "query": asked,
            "completion": row["completion"],
            "expected_answer": row.get("answer", ""),
            "reward": row["reward"],
            "stop_condition": row["stop_condition"],
        }
        return record | {name: row[name] for name in self._columns if name in row}

    def reflect(self, prompt: str | list[dict[str, Any]]) -> str:
        """The teacher's answer. Raises NoPrompt."""
        if self.broken is not None:
            raise self.broken  # the library asks again
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(one["content"]) for one in prompt)
        self._board.say("the teacher reflects")
        whose = f"the teacher {self._teacher_name}: "
        answer = self._call(ask(self._teacher, text, self._max_tokens), whose)
        why = _why_no_prompt(answer, self._max_tokens)
        self._no_prompts = self._no_prompts + 1 if why else 0
        if self._no_prompts == NO_PROMPTS:
            self.broken = QuartetError("INVALID_CONFIG", f"{whose}{NO_PROMPTS} answers in a row: {why}")
            raise self.broken
        if why:
            self._board.say(why)
            raise NoPrompt(why)
        return answer.message.content

    def _call(self, work: Coroutine[Any, Any, T], whose: str = "") -> T:
        """From the library's thread to the loop and back; `whose` fault it is, if it is somebody's."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except (QuartetError, ConfigError) as error:
            self.broken = error
            if whose:
                self.broken = (
                    QuartetError(error.reason, f"{whose}{error.message}")
                    if isinstance(error, QuartetError)
                    else ConfigError(f"{whose}{error}")
                )
            raise
        except Exception as error:  # what the teacher's client library raises
            self.broken = QuartetError("INTERNAL", f"{whose}{type(error).__name__}: {error}")
            raise

    async def _play(self, batch: Sequence[tuple[str, int]], prompt: str) -> list[Row]:
        self._policy.prompt = prompt
        validated = (key for key in batch if key[0] == "eval" and (prompt, key[1]) in self._validated)
        rows = {key: self._validated[prompt, key[1]] for key in validated}
        self._told, self._wanted = time.monotonic(), len(set(batch))
        for _ in range(ATTEMPTS):
            failed: list[Rollout] = []
            for split in sorted({split for split, _ in batch}):
                missing = [key for key in batch if key[0] == split and key not in rows]
                await self._some(prompt, split, missing, rows, failed)
            if not failed:
                return [rows[key] for key in batch]
        worst = failed[0]
        why = f"{failure_kind(worst)}: {worst.failure.message}"
        raise QuartetError("INTERNAL", f"{len(failed)} rollouts went on failing, the first as {why}")

    async def _some(
        self,
        prompt: str,
        split: str,
        keys: Sequence[tuple[str, int]],
        rows: dict[tuple[str, int], Row],
        failed: list[Rollout],
    ) -> None:
        tasks = [self._tasks[split][index] for _, index in dict.fromkeys(keys)]
        position = {task.index: at for at, task in enumerate(self._tasks[split])}

        def note(task: Task, rollout: Rollout) -> None:
            if rollout.HasField("failure"):
                failed.append(rollout)
                self._tell(self._named(prompt, split), len(rows), failed)
                return
            data = json.loads(task.data_json)
            columns = {name: data[name] for name in self._columns if name in data}
            index, row = position[task.index], columns | result_row(task, rollout)
            rows[split, index] = row
            if split == "eval":
                append_line(self._file, {"prompt": prompt, "index": index, "row": row})
                self._validated[prompt, index] = row
            self._tell(self._named(prompt, split), len(rows), failed)

        trial = replace(self._trial, split=split)
        await play(self._host, trial, {task.index: [0] for task in tasks}, tasks, note, self._policy)

    def _tell(self, name: str, done: int, failed: Sequence[Rollout]) -> None:
        """How far it is, where nothing was said for a while."""
        if time.monotonic() - self._told >= TOLD_SECONDS:
            self._told = time.monotonic()
            again = f"; {len(failed)} failed, which are tried again" if failed else ""
            self._board.say(f"{name}: {done} of {counted(self._wanted, 'rollout')} ended{again}")


def _why_no_prompt(answer: ModelAnswer, max_tokens: int) -> str:
    """Empty where there is one; else in a sentence."""
    text = answer.message.content
    if answer.truncated and text.count("```") < 2:  # between two of them the prompt stands
        where = "before the end of its prompt" if text.strip() else "before it said anything"
        return f"the teacher's answer was cut at {max_tokens} tokens, {where}; raise reflection_max_tokens"
    if not InstructionProposalSignature.output_extractor(text)["new_instruction"]:
        return "the teacher's answer has no prompt in it; name another reflection_model"
    return ""
