"""A file of prime-rl's `sft` as a fine-tuning.

1. As of a run (translation.py): every key is translated, told to be without effect, or refused in one
   sentence, and what is left out has prime-rl's default.
2. There a step is `batch_size` rows of `seq_len` tokens that chats fill up: as many tokens are a step here
   (batch_tokens), of whole chats. One of more than `seq_len` is cut, as there.
3. Data are files of this machine: no hub is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.run.dialect import RunDraft, Translation, Untranslated, refuse, shown
from quartet.run.prime_rl import placement, training
from quartet.run.prime_rl.given import Given, Part, Said, told_together
from quartet.run.prime_rl.keys import LEFT_OUT, REFUSED, Refusals

_NOTHING: Final[Mapping[str, Any]] = {}
#: Tables that are the trainer's in a file of a run.
_OF_TRAINER: Final = ("model", "optim", "scheduler")
_PREFIX: Final = "trainer."
_TABLES: Final = (*_OF_TRAINER, "ckpt", "data", "deployment", "log", "monitors", "val", "wandb")
_ROLES: Final = ("system", "user", "assistant", "tool")
_COMPUTES: Final = "how it computes is the trainer's own choice"
_DECIDED: Final = "what data says holds for both"
_NAMED: Final = (
    "name the files of one set: a file, a folder, or a pattern such as 'DIR/data/train-*.parquet'; remove it"
)
_LEFT_OUT: Final[Mapping[str, str]] = {
    **LEFT_OUT,
    **dict.fromkeys(("clean", "clean_output_dir"), "a used folder is refused: name another --output-dir"),
    **dict.fromkeys(("renderer", "use_renderer"), "chats are rendered by the model's own template"),
    **dict.fromkeys(("matmul_precision", "gc", "loss_impl", "dist_timeout_seconds"), _COMPUTES),
    **dict.fromkeys(("eval", "inference"), "measure the model that comes out of it by quartet eval"),
    "slurm": "nothing is queued: give the command to sbatch",
    "trainer.model.seq_len": "data.seq_len decides",
    "data.stopping_strategy": "there is one set",
    "val.data.batch_size": "it is measured in parts as large as a step",
    "val.data.micro_batch_size": "it is measured in parts as large as a step",
    "val.data.pack_function": "nothing of it is cut apart",
    "val.data.shuffle": "all of it is measured",
    "val.data.seed": "all of it is measured",
    "val.data.stopping_strategy": "there is one set",
}
_REFUSED: Final[Refusals] = {
    **REFUSED,
    "trace_path": ((), "there are traces by OpenTelemetry (docs/tracing.md); remove it"),
    "memory_profiler_path": ((), "nothing is profiled here; remove it"),
    **{
        f"{table}.{key}": ((), _NAMED)
        for table in ("data", "val.data")
        for key in ("subsets", "probabilities")
    },
}


class _Tables(Given):
    """Those of the trainer stand where a run's file has them, and are told as this one has them."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        trainer = {name: tables[name] for name in _OF_TRAINER if name in tables}
        rest = {name: value for name, value in tables.items() if name not in _OF_TRAINER}
        super().__init__({**rest, "trainer": trainer} if trainer else rest)

    def named(self, path: str) -> str:
        """As a person finds it in the file."""
        return super().named(path.removeprefix(_PREFIX))


def translate(tables: Mapping[str, Any], own: Mapping[str, Any] = _NOTHING) -> Translation:
    """The fine-tuning. `own`: what is said beside the file in Quartet's own words, which will be laid over
    it.

    Raises ConfigError where a table is none, and else Untranslated.
    """
    for name in _TABLES:
        if not isinstance(tables.get(name, {}), dict) and tables[name] != "None":
            refuse(name, tables[name], "should be a table")
    given, run = _Tables(tables), RunDraft()
    parts: tuple[Part, ...] = (
        (lambda: _model(given, run), ("trainer.model",)),
        (lambda: _data(given, run, own), ("data",)),
        (lambda: _batches(given, run), ("data",)),
        (lambda: _validation(given, run), ("val",)),
        (lambda: training.optimizer(given, run), ("trainer.optim",)),
        (lambda: training.schedule(given, run), ("trainer.scheduler", "trainer.optim")),
        (lambda: training.adapter(given, run), ("trainer.model",)),
        (lambda: training.states(given, run), ("ckpt",)),
        (lambda: placement.reports(given, run), ("wandb", "monitors")),
        (lambda: _devices(given, run), ("deployment",)),
        (lambda: _length(given, run, own), ()),
    )
    refused, silent = told_together(parts)
    folder = given.take("output_dir")
    run.names["output_dir"] = str(folder.value) if folder.value is not None else None
    for key, other in (("batch_tokens", "batch_size"), ("max_steps", "epochs")):
        if other in own:
            run.tables.pop(key, None)
    found = list(given.rest(_LEFT_OUT, _REFUSED, silent))
    run.leave(one for one in found if isinstance(one, str))
    refused += [one for one in found if isinstance(one, ConfigError)]
    run.origins = {path: source.removeprefix(_PREFIX) for path, source in run.origins.items()}
    if refused:
        raise Untranslated(together(refused), run.finished())
    return run.finished()


def _model(given: Given, run: RunDraft) -> None:
    name = given.take("trainer.model.name")
    if name.is_given:
        run.put("model", name.value, name.source)
    frozen = given.take("trainer.model.freeze_moe_router", default=False)
    if frozen.flag():
        refuse(frozen.source, True, "a fine-tuning moves the routers, too; remove it")
    training.memory(given, run)
    shared = given.take("trainer.model.cp", default=1)
    if shared.count() > 1:
        run.put("trainer.context_parallel", shared.value, shared.source)


def _data(given: Given, run: RunDraft, own: Mapping[str, Any]) -> None:
    kind = given.take("data.type", default="sft")
    if kind.value != "sft":
        refuse(kind.source, kind.value, "there are no made-up data; remove it, and name a file")
    name = _name(given, "data")
    if name.is_given:
        run.put("data", name.value, name.source)
    elif "data" not in own:
        refuse(
            "data.name", None, "set it to a file, a folder or a pattern; no hub is asked for the default set"
        )
    shuffled = given.take("data.shuffle", default=True)
    if not shuffled.flag():
        refuse(
            shuffled.source, False, "each pass has an order of its own, which follows from seed; remove it"
        )
    seed = given.take("data.seed", default=0)
    run.put("seed", seed.value, seed.source)
    roles = [role for role in _ROLES if _learned(given, f"data.loss_mask.{role}", role).flag()]
    if not roles:
        refuse("data.loss_mask", given.peek("data.loss_mask"), "something has to be learned; set assistant")
    run.put("roles", roles, "data.loss_mask")


def _name(given: Given, table: str) -> Said:
    """What names the files; of sources, as later releases have them, there has to be one."""
    sources = given.entries(f"{table}.source")
    if len(sources) > 1:
        refuse(given.named(f"{table}.source"), len(sources), f"there is one set; {_NAMED}")
    name = given.take(f"{table}.name")
    splits = given.take(f"{table}.splits")
    if splits.value not in (None, ["train"]):
        refuse(splits.source, splits.value, _NAMED)
    if not sources:
        return name
    (one,) = sources
    found = one.take("dataset", "name", "path")
    for error in one.rest({}, {}):
        if isinstance(error, ConfigError):
            raise error
    return found


def _learned(given: Given, path: str, role: str) -> Said:
    return given.take(path, default=role == "assistant")


def _batches(given: Given, run: RunDraft) -> None:
    rows = given.take("data.batch_size", default=128)
    width = given.take("data.seq_len", default=128)
    micro = given.take("data.micro_batch_size", default=1)
    packed = given.take("data.pack_function", default="cat")
    if packed.value == "stack":
        run.leave([shown(packed.source, "stack", "nothing is padded: a step is as many tokens as with cat")])
    elif packed.value != "cat":
        refuse(packed.source, packed.value, 'choose "cat" or "stack"')
    run.put("max_tokens", width.count(), width.source)
    run.put("overlong", "cut", width.source)
    run.put("batch_tokens", rows.count() * width.count(), rows.source)
    run.put("microbatch_tokens", micro.count() * width.count(), micro.source)


def _validation(given: Given, run: RunDraft) -> None:
    if given.peek("val") is None:
        given.take("val")  # it may be "None"
        return
    kind = given.take("val.data.type", default="sft")
    name = _name(given, "val.data")
    if kind.value != "sft" or not name.is_given:
        refuse("val.data.name", name.value, "set it to a file, a folder or a pattern, or remove [val]")
    run.put("validation", name.value, name.source)
    every = given.take("val.interval", default=50)
    run.put("eval.interval", every.count(), every.source)
    begins = given.take("val.eval_on_start", default=False)
    run.put("eval.before", begins.flag(), begins.source)
    same: dict[str, Any] = {"seq_len": 128} | {f"loss_mask.{one}": one == "assistant" for one in _ROLES}
    for key, default in same.items():
        measured = given.take(f"val.data.{key}", default=given.take(f"data.{key}", default=default).value)
        if measured.is_given and measured.value != given.take(f"data.{key}", default=default).value:
            refuse(measured.source, measured.value, f"{_DECIDED}; give it the same, or remove it")


def _devices(given: Given, run: RunDraft) -> None:
    kind = given.take("deployment.type", default="single_node")
    count = given.take("deployment.num_gpus", "deployment.num_train_gpus", default=1)
    nodes = given.take("deployment.num_nodes", "deployment.num_train_nodes", default=1)
    given.take("deployment.num_infer_gpus")
    if kind.value == "multi_node" or nodes.count() > 1:
        refuse(kind.source, kind.value, "quartet sft trains on this machine alone; remove it")
    if count.count() > 1:
        run.put("trainer.ranks", count.value, count.source)


def _length(given: Given, run: RunDraft, own: Mapping[str, Any]) -> None:
    said = given.take("max_steps")
    if said.value is not None:
        run.put("max_steps", said.value, said.source)
    elif not {"max_steps", "epochs"} & own.keys():
        refuse("max_steps", None, "a fine-tuning ends here; set it, or --epochs 1")
