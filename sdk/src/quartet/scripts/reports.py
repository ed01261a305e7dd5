"""Where a script's run or fine-tuning is reported: `report_to`, which is "wandb", "tensorboard", or both."""

from __future__ import annotations

import logging
import os

from quartet.run import tensorboard
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.draft import Draft


def reports_to(args: ArgumentList) -> tuple[str, ...]:
    """Where a run is to be reported."""
    asked = (args.report_to,) if isinstance(args.report_to, str) else tuple(args.report_to or ())
    known = {"all": ("wandb", "tensorboard") if tensorboard.is_installed() else ("wandb",), "none": ()}
    return tuple(dict.fromkeys(one for name in asked for one in known.get(name, (name,))))


def project_of(args: ArgumentList, told: logging.Logger) -> str | None:
    """The project in Weights & Biases, where the arguments ask for it and it can be reported there."""
    from quartet.cli.wandb.reporter import lacks
    from quartet.run.wandb import WandbConfig

    if "wandb" not in reports_to(args):
        return None
    project = os.environ.get("WANDB_PROJECT") or str(args.project)
    if (lacking := lacks(WandbConfig(project=project))) is None:
        return project
    # Defaults may ask for it, and the script may have said nothing; what is trained is no worse for not being
    # shown there.
    told.warning(
        "the run is not shown in Weights & Biases: %s; %s, or args.report_to = 'none' says that it need not "
        "be",
        lacking.why,
        lacking.remedy,
    )
    return None


def report(draft: Draft, wandb_project: str | None, beside: str = "") -> None:
    """Put it. `wandb_project` is None where it cannot be reported there, which whoever found that says.
    `beside`: what else tells of it, in words."""
    for name in reports_to(draft.args):
        if name == "tensorboard":
            draft.put("tensorboard.enabled", True, "report_to")
        elif name != "wandb":
            draft.notes.append(
                f"args.report_to = {name!r} is without effect: metrics.jsonl in output_dir has every step, "
                f'{beside}and "wandb" and "tensorboard" are known'
            )
        elif wandb_project is not None:
            draft.put("wandb.project", wandb_project, "project")
            if draft.args.run_name is not None:
                draft.take("run_name", "wandb.name")
