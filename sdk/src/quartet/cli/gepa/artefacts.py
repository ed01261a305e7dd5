"""The files of an optimisation, in the form of Verifiers' own (`verifiers.gepa.v1`).

best_prompt.txt        the best prompt
best_env.toml          the environment with it, for `@ best_env.toml` after a run's own file
results.jsonl          a line for each candidate: its prompt, score and parents
pareto_frontier.jsonl  for each validation example, the candidates that do best on it
metadata.json          settings and summary
"""

from __future__ import annotations

import difflib
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from quartet.cli.gepa.adapter import COMPONENT
from quartet.cli.outputs import PRIVATE, Row, write_json, write_lines, write_text
from quartet.local.toml_text import dumps
from quartet.run.hosted import HostedConfig

SCHEMA: Final = "verifiers.gepa.v1"
METADATA: Final = "metadata.json"
BEST_PROMPT: Final = "best_prompt.txt"
BEST_ENV: Final = "best_env.toml"


def write_artefacts(folder: Path, result: Any, env: HostedConfig, api: str, settings: Row) -> Row:
    """Write all of it. The environment's arguments with the best prompt."""
    prompts = [str(candidate[COMPONENT]) for candidate in result.candidates]
    best = prompts[result.best_idx]
    (folder / BEST_PROMPT).write_text(best, encoding="utf-8")
    # A v1 taskset reads it from a file; a classic package is given it.
    args = {**env.args, COMPONENT: str(folder / BEST_PROMPT) if api == "v1" else best}
    said = env.model_dump(mode="json", exclude_unset=True)
    write_text(folder / BEST_ENV, dumps({"env": [said | {"args": args}]}), PRIVATE)
    write_lines(folder / "results.jsonl", [_candidate(result, prompts, at) for at in range(len(prompts))])
    write_lines(folder / "pareto_frontier.jsonl", _frontier(result, prompts))
    summary = {
        "num_candidates": len(prompts),
        "best_idx": result.best_idx,
        "best_score": result.val_aggregate_scores[result.best_idx],
        "initial_score": result.val_aggregate_scores[0],
        "total_metric_calls": result.total_metric_calls,
        "initial_prompt_sha256": _digest(prompts[0]),
        "best_prompt_sha256": _digest(best),
        "best_prompt_path": BEST_PROMPT,
        "results_path": "results.jsonl",
        "completed_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(folder / METADATA, head(settings) | summary, PRIVATE)
    return args


def head(settings: Row) -> Row:
    """What metadata.json says from the beginning."""
    return {
        "schema_version": SCHEMA,
        "eval_kind": "gepa",
        "optimizer": "gepa",
        "optimization_target": COMPONENT,
        "env_id": settings["env_id"],
        "model": settings["model"],
        "reflection_model": settings["reflection_model"],
        "config": settings,
    }


def _candidate(result: Any, prompts: list[str], at: int) -> Row:
    score = result.val_aggregate_scores[at]
    before, after = prompts[0].splitlines(), prompts[at].splitlines()
    diff = difflib.unified_diff(before, after, "initial", "candidate", lineterm="")
    return {
        "example_id": at,
        "reward": score,
        "score": score,
        "info": {
            "schema_version": SCHEMA,
            "eval_kind": "gepa",
            "sample_type": "gepa_candidate",
            "optimization_target": COMPONENT,
            "candidate_idx": at,
            "is_best": at == result.best_idx,
            "system_prompt": prompts[at],
            "system_prompt_sha256": _digest(prompts[at]),
            "diff_from_initial": "\n".join(diff),
            "parent_candidate_idxs": [one for one in result.parents[at] if one is not None],
            "val_subscores": {str(key): value for key, value in result.val_subscores[at].items()},
            "num_val_examples": len(result.val_subscores[at]),
            "discovery_metric_calls": result.discovery_eval_counts[at],
        },
    }


def _frontier(result: Any, prompts: list[str]) -> list[Row]:
    rows = []
    for row, best in sorted(result.per_val_instance_best_candidates.items()):
        scores = {at: result.val_subscores[at][row] for at in sorted(best)}
        rows.append(
            {
                "schema_version": SCHEMA,
                "valset_row": row,
                "best_score": max(scores.values()),
                "num_best_candidates": len(scores),
                "best_candidates": [
                    {"candidate_idx": at, "system_prompt_sha256": _digest(prompts[at]), "score": score}
                    for at, score in scores.items()
                ],
            }
        )
    return rows


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
