"""What a fine-tuning learns of a chat by the templates that models are published with: what TRL's versions of
them mark, without what the generation prompt has, and without the line end behind a turn."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.sft.chats import read_chats
from quartet.cli.sft.line import Conversation
from quartet.cli.sft.rendered import Covering, sample_of
from quartet.cli.sft.template import Template
from quartet.cli.tiny.files import PHRASES, write_model_files
from quartet.config import ConfigError
from tokenizers import Tokenizer

trl = pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = {"role": "user", "content": "hi"}
THOUGHT = {"role": "assistant", "content": "four", "reasoning_content": "hm"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "system", "content": "be brief"}, ASKED, {"role": "assistant", "content": "four"}],
    "two": [ASKED, {"role": "assistant", "content": "four"}, ASKED, {"role": "assistant", "content": "five"}],
    "thought": [ASKED, THOUGHT],
    "called": [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "it is 2"},
    ],
}
EVERY = set(CHATS)
#: By template, what is refused of them: what it does not know itself, and, of those that open a thinking,
#: answers that have none.
REFUSED = {
    "cohere2_training": {"called"}, "cohere_training": {"called"}, "gemma3_training": {"called"},
    "gemma_training": {"one", "called"}, "glm4moe_training": set(), "lfm2_training": set(),
    "lfm2_v2_training": set(), "llama3_training": set(), "nemotron_3_nano_training": EVERY - {"thought"},
    "nemotron_3_super_training": EVERY - {"thought"}, "phi3_training": {"two", "called"},
    "qwen2_5_training": set(), "qwen3_training": set(), "qwen3_5_nothink_training": {"thought"},
    "qwen3_5_think_training": set(), "qwen3_6_training": set(), "qwen3_8_training": set(),
    "qwen3_instruct_2507_training": set(), "deepseek_r1_distill_training": EVERY,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known") / "model"
    write_model_files(folder, PHRASES)
    return folder


def source_of(name: str) -> str:
    return (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_learned_is_what_trl_marks(model: Path, name: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    theirs.bos_token = theirs.eos_token
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    template = Template(source_of(name), {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token})
    refused = set()
    for kind, messages in CHATS.items():
        tools = [TOOL] if kind == "called" else []
        try:
            sample = sample_of(
                Conversation(messages, tools, frozenset()), Covering(("assistant",)), template, tokenizer
            )
        except ValueError:
            refused.add(kind)
            continue
        found = theirs.apply_chat_template(
            messages, tools=tools or None, chat_template=source_of(name), return_assistant_tokens_mask=True,
            return_dict=True,
        )  # fmt: skip
        assert list(sample.token_ids) == found["input_ids"][: len(sample.token_ids)], kind
        pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
        marked = [
            tokenizer.decode([token for token, _ in run], skip_special_tokens=False).strip()
            for is_marked, run in groupby(pairs, key=lambda pair: pair[1])
            if is_marked
        ]
        covered = [
            tokenizer.decode(sample.token_ids[one.start : one.start + one.length], skip_special_tokens=False)
            for one in sample.spans
        ]
        assert len(marked) == len(covered) and covered, kind
        for mine, whole in zip(covered, marked, strict=True):
            assert whole.endswith(mine.strip()) and whole.removesuffix(mine.strip()).strip() in (
                "", "<think>", "<think>\n\n</think>",
            ), kind  # fmt: skip
    assert refused == REFUSED[name]


def test_an_answer_that_does_not_go_on_from_the_generation_prompt_is_told_so(
    model: Path, tmp_path: Path
) -> None:
    (model / "chat_template.jinja").write_text(source_of("nemotron_3_nano"))
    file = tmp_path / "chats.json"
    file.write_text(
        '[{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]}]'
    )
    with pytest.raises(
        ConfigError, match=r"message 2 does not go on from .*<think>\\n': give it what follows"
    ):
        read_chats(file, model, ("assistant",), 4096)


#: Of which a template leaves out a part.
SYSTEMS = [{"role": "system", "content": text} for text in ("be brief", "be kind")]
ANSWERED = CHATS["one"][-1]
PARTS: dict[str, list[dict[str, Any]]] = {
    "beside": [ASKED, {"role": "assistant", "content": "let me", "tool_calls": [CALL]}],
    "two calls": [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL | {"id": "abcdefgh2"}]},
    ],
    "systems": [*SYSTEMS, ASKED, ANSWERED],
    "behind text": [ASKED, ANSWERED, CHATS["called"][2]],
}
LEAVES_OUT = "chats with {} that the chat template leaves out: 1; the model never sees it: line {}; use"
ENDLESS = "chats in which no token that is learned ends a turn: {}; the model does not learn to stop"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen3_training", []),
        ("qwen2_5", [LEAVES_OUT.format("reasoning_content", "1 (message 2)")]),
        (
            "llama3",
            [LEAVES_OUT.format("reasoning_content", "1 (message 2)"),
             LEAVES_OUT.format("tool_calls", "2 (message 2)"), ENDLESS.format(2)],
        ),
        ("glm4moe", [ENDLESS.format(2)]),
    ],
)  # fmt: skip
def test_what_a_template_does_not_let_a_model_learn_is_told(
    model: Path, tmp_path: Path, name: str, told: list[str]
) -> None:
    notices = notices_of(model, tmp_path, name, CHATS["thought"], CHATS["called"][:2])
    assert len(notices) == len(told)
    for notice, begins in zip(notices, told, strict=True):
        assert notice.startswith(begins)


@pytest.mark.parametrize(
    ("name", "what", "line"),
    [
        ("llama3_1", "content of assistant", "1 (message 2)"),
        ("qwen3_vl", "content of system", "3 (message 2)"),
        ("gemma4", "content of tool", "4 (message 3)"),
        ("qwen2_5", "", ""),
    ],
)
def test_a_part_of_a_turn_that_a_template_leaves_out_is_told(
    model: Path, tmp_path: Path, name: str, what: str, line: str
) -> None:
    chats = [one for kind, one in PARTS.items() if (name, kind) != ("llama3_1", "two calls")]
    notices = notices_of(model, tmp_path, name, *chats)
    told = [one for one in notices if "leaves out" in one]
    assert len(told) == bool(what)
    assert all(one.startswith(LEAVES_OUT.format(what, line)) for one in told)


def test_tools_are_told_where_a_template_shows_none_and_nowhere_else() -> None:
    """Of all of them, but for those that refuse the chat."""
    told = dict[bool, int]()
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        template = Template(file.read_text(), {"bos_token": "<b>", "eos_token": "<e>"})
        for kind in ("two", "called"):
            try:
                text = template.render(CHATS[kind], [TOOL], False)
            except ValueError:
                continue
            is_told = template.leaves_out_tools(CHATS[kind], [TOOL], {})
            assert is_told == ("Adds." not in text), (file.stem, kind)
            assert not template.leaves_out_tools(CHATS[kind], [], {})
            told[is_told] = told.get(is_told, 0) + 1
    assert min(told[True], told[False]) > 10


def notices_of(model: Path, folder: Path, name: str, *chats: list[dict[str, Any]]) -> list[str]:
    """What is told of these by a template, but for tools that they do not list."""
    (model / "chat_template.jinja").write_text(source_of(name))
    file = folder / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": one}) for one in chats))
    notices = read_chats(file, model, ("assistant",), 4096).notices
    return [one for one in notices if "list none" not in one]


def test_what_is_shown_goes_by_the_variables_of_a_chat(model: Path, tmp_path: Path) -> None:
    template = source_of("qwen2_5").replace(
        "message.content + '<|im_end|>'",
        "((message.reasoning_content or '') if thinking else '') + message.content + '<|im_end|>'",
    )
    assert "thinking" in template
    (model / "chat_template.jinja").write_text(template)
    file = tmp_path / "chats.jsonl"
    chats = [
        {"messages": CHATS["thought"], "chat_template_kwargs": {"thinking": one}} for one in (True, False)
    ]
    file.write_text("\n".join(map(json.dumps, chats)))
    (notice,) = read_chats(file, model, ("assistant",), 4096).notices
    assert notice.startswith("chats with reasoning_content that the chat template leaves out: 1;")
