"""Files of prime-rl's `sft`: how they are known, what becomes of their keys, and what is refused (sft.py,
sft_form.py).

Defaults are those of prime-rl 0.8.0, read off prime_rl/configs/{sft,trainer}.py.
"""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prime_rl_tables import SEVEN
from quartet.cli.__main__ import main
from quartet.cli.sft import command
from quartet.cli.sft.file import load_sft
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.run.prime_rl import Form, sft_form
from quartet.run.prime_rl.sft import translate
from quartet.run.sft import SftConfig
from vf_rl_tables import value_at

LEAST = 'max_steps = 20\n[model]\nname = "m"\n[data]\nname = "chats.jsonl"\n'
#: As its users write them.
WHOLE = """
max_steps = 20
output_dir = "outputs/air"
clean_output_dir = true

[env_vars]
TRITON_CACHE_DIR = "/tmp/triton"

[slurm]
job_name = "air"

[wandb]
project = "p"
name = "air"

[ckpt]
interval = 5
keep_last = 1

[model]
name = "m"
impl = "custom"
attn = "flash_attention_3"
cp_style = "ulysses"
fused_lm_head_token_chunk_size = 1024
optim_cpu_offload = true

[model.ac]
freq = 1

[model.lora]
rank = 8
target_modules = ["q_proj"]

[model.compile]

[data]
type = "sft"
name = "data/train-*.parquet"
splits = ["train"]
seq_len = 512
batch_size = 8
micro_batch_size = 2
seed = 3

[data.loss_mask]
user = true

[val]
interval = 10
eval_on_start = true

[val.data]
name = "val.jsonl"
seq_len = 512
loss_mask = { user = true }

[optim]
type = "muon"
lr = 1e-5

[scheduler]
type = "cosine"
warmup_steps = 3

[log]
level = "info"
"""


def of(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def config(text: str, **own: Any) -> SftConfig:
    return validate(SftConfig, translate(of(text), own).tables)


def test_promise_1_what_a_file_leaves_out_is_as_in_prime_rl() -> None:
    expected = {
        "model": "m",
        "data": Path("chats.jsonl"),
        "max_steps": 20,
        "roles": ("assistant",),
        "max_tokens": 128,
        "overlong": "cut",
        "batch_tokens": 128 * 128,
        "microbatch_tokens": 128,
        "seed": 0,
        "learning_rate": 1e-6,
        "lr_scheduler": "constant",
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "adam_beta2": 0.999,
        "validation": None,
        "lora.enabled": False,
        "wandb.project": None,
    }
    found = config(LEAST)
    assert {path: value_at(found, path) for path in expected} == expected
    assert translate(of(LEAST)).without_effect == ()


def test_promises_1_and_2_every_key_is_translated_or_told() -> None:
    given = of(WHOLE)
    before = copy.deepcopy(given)
    run = translate(given)
    assert given == before, "its tables stay as they are"
    expected = {
        "data": Path("data/train-*.parquet"),
        "roles": ("user", "assistant"),
        "max_tokens": 512,
        "batch_tokens": 8 * 512,
        "microbatch_tokens": 2 * 512,
        "seed": 3,
        "validation": Path("val.jsonl"),
        "eval.interval": 10,
        "eval.before": True,
        "eval.after": True,
        "optimizer": "muon",
        "momentum": 0.95,
        "adam_beta2": 0.95,
        "lr_scheduler": "cosine",
        "warmup_steps": 3,
        "ckpt.interval": 5,
        "ckpt.keep_last": 1,
        "lora.r": 8,
        "lora.alpha": 32.0,
        "lora.target_modules": ("q_proj",),
        "wandb.project": "p",
        "wandb.name": "air",
    }
    found = validate(SftConfig, run.tables)
    assert {path: value_at(found, path) for path in expected} == expected
    assert found.trainer == {"gradient_checkpointing": True, "optimizer_offload": True}
    assert run.output_dir == "outputs/air"
    told = [one.split(" = ")[0] for one in run.without_effect]
    assert sorted(told) == [
        *("clean_output_dir", "env_vars", "log", "model.attn", "model.cp_style"),
        *("model.fused_lm_head_token_chunk_size", "model.impl", "slurm"),
    ]


def test_an_adapter_is_of_the_seven_linear_modules() -> None:
    found = config(LEAST + "[model.lora]\n")
    assert found.lora.enabled and found.lora.target_modules == SEVEN and found.lora.r == 16


def test_of_sources_there_is_one_as_later_releases_have_it() -> None:
    text = LEAST.replace('name = "chats.jsonl"', "")
    assert config(text + '[[data.source]]\ndataset = "d.jsonl"\n').data == Path("d.jsonl")
    two = text + '[[data.source]]\ndataset = "d"\n[[data.source]]\ndataset = "e"\n'
    with pytest.raises(ConfigError, match=r"data\.source = 2 is refused: there is one set; name the files"):
        translate(of(two))
    with pytest.raises(ConfigError, match=r"data\.source\.0\.subset = \"x\" is refused"):
        translate(of(text + '[[data.source]]\ndataset = "d"\nsubset = "x"\n'))


def test_what_is_said_in_quartets_own_words_wins() -> None:
    without = LEAST.replace("max_steps = 20\n", "").replace('name = "chats.jsonl"\n', "")
    run = translate(of(without), {"epochs": 2, "data": "d", "batch_size": 4})
    assert not {"max_steps", "batch_tokens", "data"} & run.tables.keys()
    assert "max_steps" not in translate(of(LEAST), {"epochs": 2}).tables


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('[data]\nname = "d"\nsubsets = ["a"]', r'data\.subsets = \["a"\] is refused: name the files'),
        ('[data]\nname = "d"\nsplits = ["test"]', r'data\.splits = \["test"\] is refused: name the files'),
        ('[data]\ntype = "fake"', r'data\.type = "fake" is refused: there are no made-up data'),
        ("[data]", r"data\.name = null is refused: set it to a file, a folder or a pattern"),
        ('[data]\nname = "d"\nshuffle = false', r"data\.shuffle = false is refused: each pass has an order"),
        ('[data]\nname = "d"\npack_function = "x"', r'data\.pack_function = "x" is refused: choose "cat"'),
        ('[data]\nname = "d"\nbatch_size = 0', r"data\.batch_size = 0 is refused: should be a whole number"),
        ('[data]\nname = "d"\nloss_mask = { assistant = false }', r"data\.loss_mask = .*something has"),
        ('[data]\nname = "d"\nseqlen = 5', r"data\.seqlen = 5 is refused: did you mean 'data\.seq_len'\?"),
        ('[data]\nname = "d"\n[val]', r"val\.data\.name = null is refused: set it to a file"),
        (
            '[data]\nname = "d"\n[val.data]\nname = "v"\nseq_len = 64',
            r"val\.data\.seq_len = 64 is refused: what data says holds for both",
        ),
        (
            '[data]\nname = "d"\n[val.data]\nname = "v"\nloss_mask = { tool = true }',
            r"val\.data\.loss_mask\.tool = true is refused: what data says holds for both",
        ),
        (
            '[data]\nname = "d"\n[deployment]\ntype = "multi_node"',
            r'deployment\.type = "multi_node" is refused: quartet sft trains on this machine alone',
        ),
        ('[data]\nname = "d"\n[optim]\nlrate = 1', r"optim\.lrate = 1 is refused"),
        ('[data]\nname = "d"\n[optim]\ntype = "sign_sgd"', r'optim\.type = "sign_sgd" is refused: choose'),
        ('trace_path = "t"\n[data]\nname = "d"', r'trace_path = "t" is refused: there are traces by'),
        ('[data]\nname = "d"\n[tokenizer]\nname = "t"', r'tokenizer\.name = "t" is refused: the tok'),
        ("data = 5\noptim = {}", r"data = 5 is refused: should be a table"),
        ('[data]\nname = "d"\n[model]\nfreeze_moe_router = true', r"model\.freeze_moe_router = true is"),
    ],
)  # fmt: skip
def test_what_no_fine_tuning_here_can_do_is_refused(more: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        translate({"max_steps": 20, **of(more)})


def test_the_length_has_to_be_said() -> None:
    with pytest.raises(
        ConfigError, match=r"max_steps = null is refused: a fine-tuning ends here; set it, or"
    ):
        translate(of(LEAST.replace("max_steps = 20", "")))


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (LEAST, Form.THEIRS),
        (WHOLE, Form.THEIRS),
        ('[model]\nname = "m"', Form.THEIRS),
        ("[ckpt]\ninterval = 5\n[wandb]\nproject = 'p'", Form.OURS),
        ("max_steps = 3\n[eval]\ninterval = 5", Form.OURS),
        ('model = "m"\ndata = "d"\nlearning_rate = 1e-5', Form.OURS),
        ('learning-rate = 1e-5\n[data]\nname = "d"', Form.MIXED),
        ('model = "m"\n[optim]\nlr = 1', Form.MIXED),
    ],
)
def test_a_file_is_known_by_its_keys(text: str, form: Form) -> None:
    """sft_form.py 1."""
    assert sft_form.form_of(of(text))[0] is form


def test_options_are_of_either_dialect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """file.py 1 and 2, sft_form.py 2."""
    (theirs := tmp_path / "theirs.toml").write_text(WHOLE)
    (mine := tmp_path / "mine.toml").write_text("epochs = 3\nlr_scheduler = 'constant'\n")
    found = load_sft(["@", str(theirs), "--optim.lr", "1e-4", "--data.batch-size=4", "--max-steps", "7"])
    assert (found.config.learning_rate, found.config.batch_tokens, found.config.max_steps) == (1e-4, 2048, 7)
    assert found.output_dir == Path("outputs/air")
    said, without = capsys.readouterr().err.splitlines()
    assert said == (
        f"{theirs}: read as prime-rl's sft, what it leaves out as in prime-rl 0.8.0; 'quartet sft --dry-run' "
        "shows the fine-tuning that it is"
    )
    assert without.startswith("without effect here: ") and "slurm = " in without
    found = load_sft(["@", str(theirs), "--data", "d.jsonl", "--batch-size", "4", "--wandb.name", "x"])
    assert (found.config.data, found.config.batch_size, found.config.batch_tokens) == (Path("d.jsonl"), 4, 0)
    assert (found.config.wandb.name, found.config.wandb.project) == ("x", "p")
    found = load_sft(["@", str(mine), "@", str(theirs)])
    assert (found.config.epochs, found.config.max_steps) == (3, None)
    assert (found.config.lr_scheduler, found.config.warmup_steps) == ("constant", 3)


def test_a_refusal_names_the_key_of_the_file_and_a_mixed_one_is_nobodys(tmp_path: Path) -> None:
    (file := tmp_path / "sft.toml").write_text(LEAST + '[optim]\nlr = "x"\n')
    with pytest.raises(ConfigError, match=rf"learning_rate = 'x' \(in optim\.lr of {file}\)"):
        load_sft(["@", str(file)])
    file.write_text('learning_rate = 1.0\n[data]\nname = "d"\n[optim]\nlr = 1.0\n')
    with pytest.raises(ConfigError) as caught:
        load_sft(["@", str(file)])
    assert (
        f"{file} mixes keys of prime-rl (optim, data.name) with Quartet's own (learning_rate); write one of "
        "the two in a file and the other in a second one"
    ) in str(caught.value)


def test_the_command_reads_it(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def accepts(specs: object) -> None:
        """The trainer would."""

    monkeypatch.setattr(command, "check", accepts)
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    (file := tmp_path / "sft.toml").write_text(LEAST.replace('"m"', f'"{chat_model}"'))
    assert main(["sft", "@", str(file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "1 chat, " in out and tomllib.loads(out)["batch_tokens"] == 128 * 128
    assert main(["sft", "@", str(file), "--data.name", "Some/Set", "--dry-run"]) == 2
    assert (
        "data = 'Some/Set' cannot be read: No such file or directory; no hub is asked: hf download "
        "--repo-type dataset Some/Set --local-dir DIR, and name its files"
    ) in capsys.readouterr().err
