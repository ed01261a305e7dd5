"""Where the run of a file of prime-rl computes, and the job that it is: [deployment], [inference.parallel],
[inference.deployment], [slurm].

1. On one machine devices are given out as there with vLLM, which is prime-rl's engine: the engine's first,
   and a replica has `tp` of them; dp is how many replicas there are.
2. On several, each computes with all of its gpus_per_node devices: num_train_nodes are the trainer's, and
   num_infer_nodes times num_infer_replicas inference's. An engine is on one machine, which has one for each
   `tp` of its devices.
3. Without vLLM the embedded engine serves, which spans no devices: one of each service is what a file says
   that says nothing: where the machine has two GPUs they get one each, else both take the one, or the CPU.
4. `trainer.model.cp` devices of the trainer share each sequence, where it has several.
5. [slurm] is the run's own table of that name. Of one machine prime-rl's script asks for all gpus_per_node.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from quartet.run.dialect import Engine, RunDraft, refuse, shown
from quartet.run.prime_rl.given import Given, Said
from quartet.run.prime_rl.placement import argument, arguments_of_vllm

#: As they are called in [deployment], and before it: in [slurm], and at the top of a file of rl_slurm.
TRAIN_NODES: Final = ("deployment.num_train_nodes", "slurm.num_train_nodes", "num_train_nodes")
INFER_NODES: Final = ("deployment.num_infer_nodes", "slurm.num_infer_nodes", "num_infer_nodes")
GPUS_PER_NODE: Final = ("deployment.gpus_per_node", "slurm.gpus_per_node", "gpus_per_node")
#: Keys that are in a table since.
AT_THE_TOP: Final = ("num_train_nodes", "num_infer_nodes", "gpus_per_node", "job_name")
#: Of one machine, by their numbers.
DEVICES: Final = ("trainer_gpu_ids", "inference_gpu_ids")
#: How many a machine has where a file says nothing of it.
USUAL_GPUS: Final = 8

_SEVERAL: Final = "multi_node"
_KINDS: Final = ("single_node", _SEVERAL)
#: Keys of one machine alone.
_TRAIN_GPUS: Final = (DEVICES[0], "deployment.num_train_gpus")
_INFER_GPUS: Final = (DEVICES[1], "deployment.num_infer_gpus")
_CONTEXT: Final = "trainer.model.cp"
_NO_VLLM: Final = "of vLLM, and the embedded engine samples"
_ANY_DEVICE: Final = "without vLLM both take the GPU, or the CPU"
#: Keys of [slurm] that are called so in both.
_SAME: Final = ("job_name", "account", "time")
#: Keys of [slurm] that are options of sbatch.
_OPTIONS: Final = ("nodelist", "exclude")


@dataclass(frozen=True)
class _Engines:
    """What the file says of inference's engines."""

    chosen: Engine
    tp: Said
    dp: Said
    #: Whether each device has experts of its own.
    experts: Said

    @property
    def devices(self) -> int:
        """Of all together, by dp. Raises ConfigError."""
        return self.tp.count() * self.dp.count()


def devices(
    given: Given, run: RunDraft, chosen: Engine, *, starts_services: bool, has_two_gpus: bool
) -> None:
    """How many machines each service has, and which devices of them."""
    extra = arguments_of_vllm(given)
    tp = argument(given, extra, "tensor_parallel_size", "inference.parallel.tp", default=1)
    dp = argument(given, extra, "data_parallel_size", "inference.parallel.dp", default=1)
    experts = given.take("inference.enable_expert_parallel")
    engines = _Engines(chosen, tp, dp, extra.get("enable_expert_parallel", experts))
    if chosen == "vllm" and tp.count() > 1:
        run.put("inference.vllm.args.tensor_parallel_size", tp.value, tp.source)
    if not starts_services:
        _on_one(given, engines)
        run.leave(given.idle("where the services are, they have their devices", _CONTEXT))
        return
    if _are_several(given):
        _on_several(given, run, engines)
    elif (nodes := _nodes_of_inference(given)) is not None:
        _inference_apart(given, run, engines, nodes)
    else:
        _give(run, chosen, *_on_one(given, engines), has_two_gpus=has_two_gpus)
    _share_sequences(given, run)


def job(given: Given, run: RunDraft) -> None:
    """[slurm], where the file has it, or the keys that were before it."""
    old = ("job_name", "slurm_template")
    if not isinstance(given.peek("slurm"), dict) and not any(key in given for key in old):
        return
    for key in _SAME:
        said = given.take(f"slurm.{key}", *(("job_name",) if key == "job_name" else ()))
        if said.value is not None:
            run.put(f"slurm.{key}", said.value, said.source)
    partition = given.take("slurm.partition", default="cluster")
    if partition.value is not None:
        run.put("slurm.partition", partition.value, partition.source)
    gpus = given.take(*GPUS_PER_NODE, default=USUAL_GPUS)
    # On several machines it follows from the services' gpus, and goes with them where another word wins.
    if not run.tables.get("inference", {}).keys() >= {"nodes", "gpus"}:
        run.put("slurm.gpus_per_node", gpus.count(), gpus.source)
    options = {key: said for key in _OPTIONS if (said := given.take(f"slurm.{key}")).value is not None}
    if options:
        lines = [f"--{key}={_text(said)}" for key, said in options.items()]
        run.put("slurm.options", lines, " and ".join(said.source for said in options.values()))
    command = given.take("slurm.pre_run_command")
    if command.value is not None:
        run.put("slurm.setup", _setup(_text(command).strip()), command.source)


def _are_several(given: Given) -> bool:
    """Whether the run has more machines than one. Raises ConfigError."""
    kind = given.take("deployment.type")
    if kind.value is not None and kind.value not in _KINDS:
        refuse(kind.source, kind.value, f'choose "{_KINDS[0]}" or "{_KINDS[1]}"')
    if kind.value == _SEVERAL or any(path in given for path in (*TRAIN_NODES[1:], *INFER_NODES[1:])):
        return True
    for path in (TRAIN_NODES[0], INFER_NODES[0], "deployment.num_infer_replicas"):
        said = given.take(path)
        if said.value not in (None, 0):
            refuse(said.source, said.value, f'write type = "{_SEVERAL}" with it, or remove it')
    return False


def _on_one(given: Given, engines: _Engines) -> tuple[Said, Said]:
    """The devices of the trainer, and of inference. Raises ConfigError."""
    train = _which(given.take(*_TRAIN_GPUS, default=1))
    serve = _which(given.take(*_INFER_GPUS))
    tp, dp = engines.tp, engines.dp
    if serve.value is None:
        serve = Said(engines.devices, (dp if dp.is_given else tp).source, dp.is_given or tp.is_given)
    number = len(serve.value) if isinstance(serve.value, list) else serve.count(0)
    if dp.is_given and number != engines.devices:
        refuse(dp.source, dp.value, f"{serve.source} has {number} devices, not tp times dp; leave dp out")
    return train, serve


def _which(said: Said) -> Said:
    """Devices by their numbers are a list, of which an option of prime-rl's may name the only one."""
    if said.source in DEVICES and type(said.value) is int:
        return replace(said, value=[said.value])
    return said


def _inference_apart(given: Given, run: RunDraft, engines: _Engines, nodes: Said) -> None:
    """Where a file of inference says that it has several machines, and nobody that the run has one."""
    if any(path in given for path in ("deployment.type", *_INFER_GPUS)):
        remedy = f'[deployment] has one machine; write type = "{_SEVERAL}" and the nodes there, or remove it'
        refuse("inference.deployment.type", _SEVERAL, remedy)
    gpus = given.take("inference.deployment.gpus_per_node", *GPUS_PER_NODE, default=USUAL_GPUS)
    _check(run, engines, gpus, nodes.count(), nodes.count())
    run.put("inference.nodes", nodes.count(), nodes.source)
    _give(run, engines.chosen, _which(given.take(*_TRAIN_GPUS, default=1)), gpus)


def _on_several(given: Given, run: RunDraft, engines: _Engines) -> None:
    gpus = given.take(*GPUS_PER_NODE, default=USUAL_GPUS)
    train = given.take(*TRAIN_NODES)
    if train.value is None:
        refuse(TRAIN_NODES[0], None, "say how many machines the trainer has, such as 1")
    own = _nodes_of_inference(given)
    serve = given.take(*INFER_NODES)
    if serve.value == 0:
        refuse(serve.source, 0, "a run here samples what it learns from; set 1 or more")
    if own is not None and serve.value is not None and own.count() != serve.count():
        refuse(own.source, own.value, f"{serve.source} says otherwise; keep one of the two")
    if serve.value is None:
        serve = own or Said(1, serve.source, False)
    replicas = given.take("deployment.num_infer_replicas", default=1)
    nodes = serve.count() * replicas.count()
    _check(run, engines, gpus, serve.count(), nodes)
    run.put("trainer.nodes", train.count(), train.source)
    run.put("inference.nodes", nodes, serve.source)
    _give(run, engines.chosen, gpus, gpus)
    run.leave(given.idle("of one machine; each of several has gpus_per_node", *_TRAIN_GPUS, *_INFER_GPUS))
    run.leave(given.idle("that of [deployment] decides", "inference.deployment.gpus_per_node"))


def _nodes_of_inference(given: Given) -> Said | None:
    """Where [inference.deployment] has machines of its own. Raises ConfigError."""
    kind = given.take("inference.deployment.type")
    if kind.value == "disaggregated":
        remedy = f'every engine both reads and answers; write type = "{_SEVERAL}" and num_nodes'
        refuse(kind.source, kind.value, remedy)
    if kind.value is not None and kind.value not in _KINDS:
        refuse(kind.source, kind.value, f'choose "{_KINDS[0]}" or "{_KINDS[1]}"')
    nodes = given.take("inference.deployment.num_nodes", default=2)
    if kind.value == _SEVERAL:
        return nodes
    if nodes.value is not None and nodes.is_given:
        refuse(nodes.source, nodes.value, f'write type = "{_SEVERAL}" with it, or remove it')
    return None


def _check(run: RunDraft, engines: _Engines, gpus: Said, span: int, nodes: int) -> None:
    """Whether each engine is on one machine. `span`: the machines of what is one replica there. Raises
    ConfigError."""
    tp, dp, experts = engines.tp, engines.dp, engines.experts
    if engines.chosen != "vllm":
        run.leave(shown(said.source, said.value, _NO_VLLM) for said in (tp, dp) if said.is_given)
        return
    here = gpus.count() // tp.count()
    if here * tp.count() != gpus.count():
        of_each = f"{gpus.source} = {gpus.value}"
        refuse(tp.source, tp.value, f"an engine is on one machine; give what divides {of_each}")
    # 1 is what prime-rl takes for nothing said.
    if dp.is_given and dp.count() not in (1, here, here * span, here * nodes):
        refuse(dp.source, dp.value, f"each of the {nodes} machines has {here} engines; leave dp out")
    if experts.value is True and span > 1:
        remedy = (
            "an engine and its experts are on one machine; set num_infer_nodes = 1, num_infer_replicas to "
            "how many there are, and tp to as many devices as hold the model"
        )
        refuse(experts.source, True, remedy)


def _share_sequences(given: Given, run: RunDraft) -> None:
    """Devices of the trainer that have parts of each sequence. Raises ConfigError."""
    cp = given.take(_CONTEXT, default=1)
    trainer = run.tables.get("trainer", {})
    if cp.count() == 1:
        return
    if "gpus" not in trainer:
        why = "a trainer that is given no devices is one process; trainer.context_parallel is the key here"
        run.leave([shown(cp.source, cp.value, why)])
        return
    each = len(trainer["gpus"]) if isinstance(trainer["gpus"], list) else trainer["gpus"]
    # What is no number is refused by whoever gives devices out; with none it is one process.
    if isinstance(each, int) and max(1, each) * trainer.get("nodes", 1) % cp.count():
        devices = each * trainer.get("nodes", 1)
        refuse(cp.source, cp.value, f"the trainer's devices are {devices}; set it to what divides that")
    run.put("trainer.context_parallel", cp.value, cp.source)


def _give(run: RunDraft, chosen: Engine, train: Said, serve: Said, *, has_two_gpus: bool = False) -> None:
    """Devices of each machine."""
    number = len(serve.value) if isinstance(serve.value, list) else serve.count(0)
    one_each = train.value == 1 and number == 1 and not isinstance(serve.value, list)
    for service, said in (("trainer", train), ("inference", serve)):
        if chosen == "vllm" or not one_each or has_two_gpus:
            run.put(f"{service}.gpus", said.value, said.source)
        elif said.is_given:
            # One each is what a file says that says nothing, also for a machine without any.
            told = shown(said.source, said.value, _ANY_DEVICE)
            run.leave([told] if told not in run.unread else [])


def _setup(command: str) -> list[str]:
    """Of [slurm] setup, whose lines are commands by themselves: several may be one, such as an `if`, and the
    first that fails ends them, as in prime-rl's script."""
    if not command:
        return []
    if not {"\n", "\r"} & set(command):
        return [command]
    quoted = command.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return [f"eval $'set -e\\n{quoted}\\nset +e'"]


def _text(said: Said) -> str:
    if not isinstance(said.value, str):
        refuse(said.source, said.value, "should be text in quotes")
    return said.value
