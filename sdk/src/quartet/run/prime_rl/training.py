"""What of a file of prime-rl is the trainer's: optimizer, schedule, loss, adapter, states.

prime-rl's default loss is Quartet's `dppo` plus kl_tau * (log r)^2 of every token. Without that term it is
`dppo`; with it, and as "ipo", it is a function that the trainer has beside its own losses
(quartet_trainer/loss/prime_rl.py).
"""

from __future__ import annotations

from typing import Final

from quartet.run.dialect import RunDraft, refuse, shown
from quartet.run.prime_rl.given import Given, Said

#: Of target_modules those that are linear modules.
LORA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: By default, beside these; names that a model does not have are passed over there.
OF_OTHER_MODELS: Final = ("experts", "fc1_latent_proj", "fc2_latent_proj")
#: By the type of a loss, the function that the trainer has.
FUNCTIONS: Final = {"default": "dppo", "ipo": "ipo"}
_OF_MOMENTUM: Final = ("trainer.optim.mu", "trainer.optim.momentum")
_WARMUP: Final = ("trainer.scheduler.warmup_steps", "trainer.optim.scheduler.warmup_steps")
_DECAY: Final = ("trainer.scheduler.decay_steps", "trainer.optim.scheduler.decay_steps")
_LEAST: Final = ("trainer.scheduler.min_lr", "trainer.optim.scheduler.min_lr")
_OF_IPO: Final = ("trainer.loss.ipo_threshold", "trainer.loss.eps")
#: Of [trainer.loss], what only some types have.
_OF_TYPE: Final = {
    ("default",): ("trainer.loss.dppo_mask_low", "trainer.loss.dppo_mask_high"),
    ("ipo",): _OF_IPO,
    ("default", "ipo"): ("trainer.loss.kl_tau",),
}


def optimizer(given: Given, run: RunDraft) -> None:
    """[trainer.optim]."""
    kind = given.take("trainer.optim.type", default="adamw")
    for key, path, default in (
        ("lr", "learning_rate", 1e-6),
        ("weight_decay", "weight_decay", 0.01),
        ("max_norm", "max_grad_norm", 1.0),
        ("betas1", "adam_beta1", 0.9),
        ("betas2", "adam_beta2", 0.95 if kind.value == "muon" else 0.999),
    ):
        said = given.take(f"trainer.optim.{key}", default=default)
        # No norm at all is what 0 is here.
        run.put(path, 0.0 if key == "max_norm" and said.value is None else said.value, said.source)
    momentum = given.take(*_OF_MOMENTUM)
    nesterov = given.take("trainer.optim.nesterov", default=True)
    match kind.value:
        case "adamw":
            run.leave(given.idle("AdamW has none", *_OF_MOMENTUM, "trainer.optim.nesterov"))
        case "muon":
            run.leave(given.idle("it is of SGD", "trainer.optim.nesterov"))
            run.put("momentum", momentum.value if momentum.is_given else 0.95, momentum.source)
        case "sgd":
            if nesterov.value is not False:
                refuse(nesterov.source, nesterov.value, "SGD has plain momentum here; set it to false")
            run.leave(given.idle("SGD has none", "trainer.optim.betas1", "trainer.optim.betas2"))
            run.put("momentum", momentum.value if momentum.is_given else 0.9, momentum.source)
        case other:
            refuse(kind.source, other, 'choose "adamw", "muon" or "sgd"')
    run.put("optimizer", kind.value, kind.source)


def schedule(given: Given, run: RunDraft) -> None:
    """[trainer.scheduler]."""
    kind = given.take("trainer.scheduler.type", "trainer.optim.scheduler.type", default="constant")
    warmup = given.take(*_WARMUP, default=10)
    decay = given.take(*_DECAY, default=10)
    least = given.take(*_LEAST, default=0.0)
    match kind.value:
        case "constant":
            run.leave(given.idle("a constant rate has none", *_WARMUP, *_DECAY, *_LEAST))
            run.put("lr_scheduler", "constant", kind.source)
            return
        case "linear" if decay.count(0):
            run.put("lr_scheduler", "warmup_stable_decay", kind.source)
            run.put("decay_steps", decay.value, decay.source)
            run.put("min_lr", least.number(), least.source)
        case "linear":
            run.leave(given.idle("without decay_steps the rate never falls", *_LEAST))
            run.put("lr_scheduler", "constant", kind.source)
        case "cosine":
            run.leave(given.idle("a cosine falls to the end", *_DECAY))
            run.put("lr_scheduler", "cosine", kind.source)
            run.put("min_lr", least.number(), least.source)
        case other:
            refuse(kind.source, other, 'choose "constant", "linear" or "cosine"')
    run.put("warmup_steps", warmup.count(0), warmup.source)


def loss(given: Given, run: RunDraft) -> None:
    """[trainer.loss], over the number of all tokens of the batch that it covers."""
    kind = given.take("trainer.loss.type", default="default")
    low = given.take("trainer.loss.dppo_mask_low", default=0.2)
    high = given.take("trainer.loss.dppo_mask_high", default=0.2)
    eps = given.take(*_OF_IPO, default=0.1)
    adv_tau = given.take("trainer.loss.adv_tau", default=1.0)
    kl_tau = given.take("trainer.loss.kl_tau", default=1e-3)
    run.put("algorithm.aggregation", "token", "what prime-rl always does")
    others = [path for name, paths in _OF_TYPE.items() if kind.value not in name for path in paths]
    run.leave(given.idle(f'type = "{kind.value}" has none', *others))
    match kind.value:
        case "default" if kl_tau.number() == 0 and adv_tau.number() == 1:
            run.put("algorithm.loss", "dppo", kind.source)
            run.put("algorithm.clip_low", low.number(), low.source)
            run.put("algorithm.clip_high", high.number(), high.source)
        case "default":
            bounds = {"mask_low": low, "mask_high": high}
            _function("default", {**bounds, "adv_tau": adv_tau, "kl_tau": kl_tau}, kind, run)
        case "ipo":
            _function("ipo", {"eps": eps, "adv_tau": adv_tau, "kl_tau": kl_tau}, kind, run)
        case "icepop" | "cispo" | "ppo":
            _later_loss(given, kind, adv_tau, run)
        case "custom":
            remedy = (
                "write it as a loss of your own ([trainer.losses], docs/algorithms.md) in a second file, "
                'with [algorithm] loss = "custom" and custom = "NAME"; remove it here'
            )
            refuse(kind.source, "custom", remedy)
        case other:
            refuse(kind.source, other, f"choose {', '.join(FUNCTIONS)}, or set [algorithm] in a second file")


def _function(kind: str, arguments: dict[str, Said], source: Said, run: RunDraft) -> None:
    name = f"prime_rl_{FUNCTIONS[kind]}"
    run.put("algorithm.loss", "custom", source.source)
    run.put("algorithm.custom", name, source.source)
    for key, said in arguments.items():
        run.put(f"algorithm.custom_args.{key}", said.number(), said.source)


def _later_loss(given: Given, kind: Said, adv_tau: Said, run: RunDraft) -> None:
    """Those that prime-rl has had since, as far as they are losses of Quartet's."""
    if adv_tau.number() != 1:
        refuse(adv_tau.source, adv_tau.value, f'advantages are not scaled with type = "{kind.value}"')
    defaults = {"icepop": (0.2, 5.0), "cispo": (0.0, 5.0), "ppo": (0.8, 1.2)}[kind.value]
    low = given.take("trainer.loss.ratio_low", default=defaults[0])
    high = given.take("trainer.loss.ratio_high", default=defaults[1])
    if kind.value == "icepop":
        run.put("algorithm.loss", "ppo", kind.source)
        run.put("algorithm.proximal", True, kind.source)
        run.put("algorithm.correction.mode", "mask", kind.source)
        run.put("algorithm.correction.floor", low.number(), low.source)
        run.put("algorithm.correction.cap", high.number(), high.source)
        return
    run.put("algorithm.loss", kind.value, kind.source)
    if kind.value == "ppo":
        run.put("algorithm.clip_low", 1 - low.number(), low.source)
        run.put("algorithm.clip_high", high.number() - 1, high.source)
        return
    if low.number():
        refuse(low.source, low.value, "the ratio has only an upper bound here; set it to 0")
    run.put("algorithm.clip_high", high.number(), high.source)


def model(given: Given, run: RunDraft) -> None:
    """[trainer.model], but for the adapter."""
    name = given.take(
        "model.name", *(f"{one}.model.name" for one in ("trainer", "orchestrator", "inference"))
    )
    # Of [inference.vllm] it is an argument of vLLM.
    served = given.take("inference.vllm.model")
    if name.is_given and served.is_given and served.value != name.value:
        refuse(served.source, served.value, f"{name.source} says otherwise; keep one of the two")
    said = name if name.is_given else served
    if said.is_given:
        run.put("model", said.value, said.source)
    tokens = given.nearest("trainer.model.seq_len", "seq_len", default=2048)
    run.put("microbatch_tokens", tokens.count(), tokens.source)
    if given.take("trainer.model.freeze_moe_router", default=False).flag():
        run.put("freeze_routers", True, "trainer.model.freeze_moe_router")
    if given.take("trainer.enable_router_replay", default=False).flag():
        run.put("algorithm.router_replay", True, "trainer.enable_router_replay")
    memory(given, run)


def memory(given: Given, run: RunDraft) -> None:
    """What of [trainer.model] takes time in the place of memory."""
    saved = given.take("trainer.model.ac", default={})
    run.put("trainer.gradient_checkpointing", saved.value not in (None, False), saved.source)
    defaults = {"optim_cpu_offload": True, "full_offload": None, "fsdp_cpu_offload": False}
    offloads = [given.take(f"trainer.model.{key}", default=one) for key, one in defaults.items()]
    chosen = next((said for said in offloads if said.value not in (None, False)), offloads[0])
    run.put("trainer.optimizer_offload", chosen.value not in (None, False), chosen.source)


def adapter(given: Given, run: RunDraft) -> None:
    """[trainer.model.lora], published as the adapter that it is; merged, where it has modules_to_save."""
    places = ("trainer.model.lora", "trainer.model.experimental.lora")
    place = next((one for one in places if given.peek(one) is not None), "")
    if not place:
        for one in places:
            given.take(one)  # it may be "None"
        return
    run.put("lora.enabled", True, place)
    for key, path, default in (
        ("rank", "lora.r", 16),
        ("alpha", "lora.alpha", 32.0),
        ("dropout", "lora.dropout", 0.0),
    ):
        # The orchestrator's is that of its own run, where several share a trainer.
        said = given.nearest(f"orchestrator.model.lora.{key}", f"{place}.{key}", default=default)
        run.put(path, said.value, said.source)
    targets = given.take(f"{place}.target_modules", default=[*LORA_TARGETS, *OF_OTHER_MODELS])
    names = targets.value
    if isinstance(names, list):
        dropped = [one for one in names if one in OF_OTHER_MODELS]
        names = [one for one in names if one not in OF_OTHER_MODELS]
        if not names:
            # None at all is every linear module here.
            refuse(targets.source, targets.value, "name linear modules; experts are lora.target_parameters")
        if dropped:
            why = "a model that has none of these lacks nothing; experts are lora.target_parameters"
            run.leave([shown(targets.source, dropped, why)])
    run.put("lora.target_modules", names, targets.source)
    saved = given.take(f"{place}.modules_to_save", default=[])
    if saved.value:
        run.put("lora.modules_to_save", saved.value, saved.source)
        run.put("lora.publish", "merged", saved.source)


def states(given: Given, run: RunDraft) -> None:
    """[ckpt]. Without an interval states are saved all the same: by them a run outlives its trainer."""
    places = ("ckpt", "trainer.ckpt", "orchestrator.ckpt")
    keep = tuple(f"{place}.{key}" for place in places for key in ("keep_last", "keep"))
    for path, paths in (
        ("ckpt.interval", tuple(f"{place}.interval" for place in places)),
        ("ckpt.keep_last", keep),
        ("ckpt.keep_interval", tuple(f"{place}.keep_interval" for place in places)),
    ):
        said = given.take(*paths)
        if said.value is not None:
            run.put(path, said.value, said.source)
    begun = given.take(*(f"{place}.resume_step" for place in places))
    if begun.value == -1:
        run.leave([shown(begun.source, begun.value, "there is --resume")])
    elif begun.value is not None:
        refuse(begun.source, begun.value, "write --resume with --output-dir; remove it")
