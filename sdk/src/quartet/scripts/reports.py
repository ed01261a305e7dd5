"""Where a script's run or fine-tuning is reported: `report_to`, which is "wandb", "mlflow", "tensorboard", or
several of them."""

from __future__ import annotations

import logging
import os

from quartet.run import mlflow, tensorboard
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.draft import Draft


def reports_to(args: ArgumentList) -> tuple[str, ...]:
    """Where a run is to be reported."""
    asked = (args.report_to,) if isinstance(args.report_to, str) else tuple(args.report_to or ())
    here = {"tensorboard": tensorboard.is_installed(), "mlflow": mlflow.is_installed() and _tracked()}
    known = {"all": ("wandb", *(name for name, can in here.items() if can)), "none": ()}
    return tuple(dict.fromkeys(one for name in asked for one in known.get(name, (name,))))


def project_of(args: ArgumentList, told: logging.Logger) -> str | None:
    """The project in Weights & Biases, where the arguments ask for it and it can be reported there."""
    from quartet.cli.wandb.place import lacks
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
        elif name == "mlflow":
            _in_mlflow(draft)
        elif name != "wandb":
            draft.notes.append(
                f"args.report_to = {name!r} is without effect: metrics.jsonl in output_dir has every step, "
                f'{beside}and "wandb", "mlflow" and "tensorboard" are known'
            )
        elif wandb_project is not None:
            draft.put("wandb.project", wandb_project, "project")
            if draft.args.run_name is not None:
                draft.take("run_name", "wandb.name")


def _in_mlflow(draft: Draft) -> None:
    """Where transformers would tell it, by the variables that it reads."""
    if not (_tracked() and mlflow.is_installed()):
        lacking = "mlflow is not installed" if _tracked() else "nobody says where"
        draft.notes.append(
            f"args.report_to = 'mlflow' is without effect: {lacking}; install './sdk[mlflow]' of the "
            "repository, and set the variable MLFLOW_TRACKING_URI to the tracking server's address, http://..."
        )
        return
    draft.put(
        "mlflow.experiment", os.environ.get("MLFLOW_EXPERIMENT_NAME") or draft.args.project, "report_to"
    )
    if draft.args.run_name is not None:
        draft.take("run_name", "mlflow.name")


def _tracked() -> bool:
    """Whether the environment names a tracking server."""
    return mlflow.is_server(os.environ.get("MLFLOW_TRACKING_URI", ""))
