"""What serves a run of prime-rl, and where it is shown: [inference], [wandb]. Its devices are in machines.py.

Without vLLM, which is prime-rl's engine, the embedded engine serves, for which arguments of vLLM have no
effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quartet.run.dialect import Engine, RunDraft, refuse, shown
from quartet.run.prime_rl.given import Given, Said
from quartet.run.prime_rl.sampling import bounds_training, longest_of_evaluations

#: Keys of [inference] and [inference.model] that are arguments of vLLM by the same name.
OF_VLLM: Final = (
    *("inference.model.enforce_eager", "inference.model.kv_cache_dtype", "inference.model.quantization"),
    *("inference.model.rope_scaling", "inference.model.enable_prefix_caching", "inference.all2all_backend"),
    *("inference.calculate_kv_scales", "inference.enable_dbo", "inference.enable_eplb", "inference.seed"),
    *("inference.enable_expert_parallel", "inference.enable_prefix_caching"),
    "inference.gpu_memory_utilization",
)
#: Of [inference.vllm] and vllm_extra, what is no argument of vLLM here.
OF_THE_FRONT: Final = {
    "model": "it is the run's model",
    "tensor_parallel_size": "",
    "data_parallel_size": "",
    "max_model_len": "",
    "dtype": "",
    "tool_call_parser": "",
    "chat_template": "",
    "reasoning_parser": "thinking is read as the chat template marks it",
    "enable_auto_tool_choice": "tool calls are read wherever there are tools",
    "served_model_name": "services find each other",
    "api_server_count": "services find each other",
    "host": "services find each other",
    "port": "services find each other",
    "enable_lora": "the engine has room for the run's adapter",
    "max_loras": "the engine has room for the run's adapter",
    "max_cpu_loras": "the engine has room for the run's adapter",
    "max_lora_rank": "the engine has room for the run's adapter",
    "logprobs_mode": "log-probabilities are those of the distribution that was sampled",
    "max_logprobs": "log-probabilities are those of the distribution that was sampled",
}
#: Arguments of vLLM that are keys beside `args`.
_OWN: Final = {"max_num_seqs": "max_num_seqs", "kv_cache_memory_bytes": "kv_cache_bytes"}
_NOT_HERE: Final = "of vLLM, and the embedded engine samples"
_OF_WANDB: Final = {
    "log_extras": "conversations are in the table `completions`",
    "shared": "one run there has all of it",
    "id": "a run that goes on is found by itself",
}


def engine(given: Given, run: RunDraft, chosen: Engine) -> None:
    """[inference], but for its devices."""
    run.put("inference.engine", chosen, "inference")
    extra = arguments_of_vllm(given)
    _room(given, extra, run)
    dtype = argument(given, extra, "dtype", "inference.model.dtype")
    if dtype.value not in (None, "auto"):
        run.put(f"inference.{chosen}.dtype", dtype.value, dtype.source)
    parser = argument(given, extra, "tool_call_parser", "inference.model.tool_call_parser")
    if parser.is_given:
        run.put("inference.chat.tool_parser", parser.value or "none", parser.source)
    _template(given, extra, run)
    arguments = {path.rpartition(".")[2]: given.take(path) for path in OF_VLLM}
    arguments |= {key: said for key, said in extra.items() if key not in OF_THE_FRONT}
    for key, said in arguments.items():
        if said.value is None:
            continue
        if chosen == "vllm":
            run.put(f"inference.vllm.{_OWN.get(key, f'args.{key}')}", said.value, said.source)
        else:
            run.leave([shown(said.source, said.value, _NOT_HERE)])
    for key, said in extra.items():
        if OF_THE_FRONT.get(key):
            run.leave([shown(said.source, said.value, OF_THE_FRONT[key])])


def unread_of(own: Mapping[str, Any]) -> list[str]:
    """Without vLLM: what is said of it in keys that both have (form.py 3), which stay Quartet's."""
    inference = own.get("inference")
    vllm = inference.get("vllm") if isinstance(inference, dict) else None
    said = vllm if isinstance(vllm, dict) else {}
    return [shown(f"inference.vllm.{key}", value, _NOT_HERE) for key, value in said.items()]


def _room(given: Given, extra: dict[str, Said], run: RunDraft) -> None:
    """How long the context is. What is longer than seq_len is sampled there, and cut off before it is trained
    on; so the context ends there, unless only evaluations fill it."""
    longest = argument(given, extra, "max_model_len", "inference.model.max_model_len", "max_model_len")
    room = given.nearest("orchestrator.seq_len", "seq_len", default=2048)
    if longest.value is not None and longest.count() <= room.count():
        run.put("inference.max_model_len", longest.value, longest.source)
        return
    asked = longest_of_evaluations(run)
    for_them = asked is not None and asked.value >= room.count()
    if for_them and bounds_training(run):
        if longest.value is not None:
            run.put("inference.max_model_len", longest.value, longest.source)
        why = (
            "the context is longer, for evaluations; a rollout of several turns that is longer is trained on "
            "whole, where prime-rl cuts it"
        )
        run.leave([shown(room.source, room.value, why)])
        return
    run.put("inference.max_model_len", room.count(), room.source)
    if asked is not None and for_them:
        why = (
            f"it ends at {room.source} = {room.value} tokens with its prompt, as all rollouts do; for longer "
            "ones give training a max_completion_tokens, or set seq_len"
        )
        run.leave([shown(asked.source, asked.value, why)])
    elif longest.value is not None:
        why = (
            f"a rollout ends at {room.source} = {room.value} tokens, where prime-rl samples on and cuts it "
            "before training; for longer ones set seq_len"
        )
        run.leave([shown(longest.source, longest.value, why)])


def arguments_of_vllm(given: Given) -> dict[str, Said]:
    """As [inference.vllm] and vllm_extra name them. Raises ConfigError."""
    return {**_table(given, "inference.vllm"), **_table(given, "inference.vllm_extra")}


def argument(given: Given, extra: dict[str, Said], name: str, *paths: str, default: Any = None) -> Said:
    """What is said by a key of prime-rl's, or as an argument of vLLM. Raises ConfigError."""
    said, own = given.take(*paths, default=default), extra.get(name)
    if own is None:
        return said
    if said.is_given and said.value != own.value:
        refuse(own.source, own.value, f"{said.source} says otherwise; keep one of the two")
    return own


def reports(given: Given, run: RunDraft) -> None:
    """[wandb], only by a word of the file: not everybody has an account."""
    places = [
        f"{service}{table}"
        for service in ("", "trainer.", "orchestrator.")
        for table in ("wandb", "monitors.wandb", "monitor.wandb")
    ]
    shows = any(isinstance(given.peek(place), dict) for place in places)
    for key in ("project", "name", "entity", "group", "tags"):
        # Of services that are shown apart there, one run here has all.
        default = "prime-rl" if shows and key == "project" else None
        said = given.nearest(*(f"{place}.{key}" for place in places), default=default)
        if said.value is not None:
            run.put(f"wandb.{key}", said.value, said.source)
    offline = given.nearest(*(f"{place}.offline" for place in places), default=False)
    if offline.flag() and shows:
        run.put("wandb.mode", "offline", offline.source)
    for key, why in _OF_WANDB.items():
        said = given.nearest(*(f"{place}.{key}" for place in places))
        if said.is_given:
            run.leave([shown(said.source, said.value, why)])


def _template(given: Given, extra: dict[str, Said], run: RunDraft) -> None:
    paths = (
        "tokenizer.chat_template",
        "trainer.tokenizer.chat_template",
        "orchestrator.tokenizer.chat_template",
    )
    said = given.take(*paths, "inference.model.chat_template")
    said = extra.get("chat_template", said)
    if said.value is None:
        return
    if not isinstance(said.value, str) or "{" in said.value or "\n" in said.value:
        refuse(said.source, said.value, "write the template into a file, and give its path")
    run.put("inference.chat.template_file", said.value, said.source)


def _table(given: Given, path: str) -> dict[str, Said]:
    table = given.take(path, default={})
    return {key: Said(value, f"{path}.{key}", True) for key, value in table.table().items()}
