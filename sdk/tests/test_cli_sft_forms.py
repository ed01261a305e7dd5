"""`quartet sft`: the forms in which its data are read, what of each is learned, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.eval.rows import result_row
from quartet.cli.sft import command
from quartet.cli.sft.chats import Chats, read_chats
from quartet.cli.sft.template import template_of
from quartet.config import ConfigError
from quartet.v1.common_pb2 import Message
from quartet.v1.rollout_pb2 import Rollout, Task
from sft_chats import parts, written
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

END = "<|im_end|>"
ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "é?"}]
ANSWERED = {"role": "assistant", "content": "yes"}


def read(model: Path, file: Path, *, roles: tuple[str, ...] = ("assistant",), most: int = 4096) -> Chats:
    return read_chats(file, model, roles, most)


def learned(model: Path, tmp_path: Path, *lines: object) -> list[tuple[str, list[str]]]:
    return [parts(model, one) for one in read(model, written(tmp_path, *lines)).samples]


CHAT = [*ASKED, ANSWERED]
SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "é?"},
    {"from": "gpt", "value": "yes"},
]


@pytest.mark.parametrize(
    "line",
    [
        {"conversations": SHAREGPT},
        {"conversations": SHAREGPT[1:], "system": "be brief"},
        {"conversations": SHAREGPT, "system": ""},
        {"conversations": CHAT},
        {"messages": SHAREGPT},
        {"messages": CHAT, "prompt": "é?", "text": "all of it"},
        {"conversations": SHAREGPT, "messages": None, "text": "all of it"},
        {"prompt": ASKED, "completion": [ANSWERED], "messages": None},
        {"prompt": SHAREGPT[:2], "completion": SHAREGPT[2:]},
    ],
)
def test_one_chat_is_the_same_in_every_form(chat_model: Path, tmp_path: Path, line: object) -> None:
    whole, covered = learned(chat_model, tmp_path, line)[0]
    assert whole == template_of(chat_model).render(CHAT, (), False).rstrip()
    assert covered == [f"yes{END}"]


def test_sharegpt_calls_tools_and_hears_them(chat_model: Path, tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]
    theirs = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "42!"},
    ]
    ours = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42!"},
    ]
    one = learned(chat_model, tmp_path, {"conversations": theirs, "tools": json.dumps(tools)})
    assert one == learned(chat_model, tmp_path, {"messages": ours, "tools": tools})
    assert [text.count("tool_call") for text in one[0][1]] == [2, 0]


def test_tools_are_also_called_as_verifiers_calls_them(chat_model: Path, tmp_path: Path) -> None:
    """line.py 1."""
    tool = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    chat = {"messages": CHAT}
    usual = learned(chat_model, tmp_path, chat | {"tools": [{"type": "function", "function": tool}]})
    assert learned(chat_model, tmp_path, chat | {"tool_defs": [tool | {"strict": None}]}) == usual
    other = [tool | {"name": "g"}]
    assert learned(chat_model, tmp_path, chat | {"tools": [tool], "tool_defs": other}) == usual
    with pytest.raises(ConfigError, match=r"line 1: tool_defs\[0\] has no name"):
        read(chat_model, written(tmp_path, chat | {"tool_defs": [{}]}))


def test_variables_of_the_template_stand_beside_a_chat(chat_model: Path, tmp_path: Path) -> None:
    """line.py 1: as TRL hands them on."""
    model = tmp_path / "thinks"
    shutil.copytree(chat_model, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and enable_thinking is false %}"
        "<no>{% endif %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% if enable_thinking is false %}<no>{% endif %}{% endif %}"
    )
    given = {"enable_thinking": False}
    lines = [
        {"messages": CHAT, "chat_template_kwargs": given},
        {"messages": CHAT, "chat_template_kwargs": json.dumps(given)},
        {"messages": CHAT, "chat_template_kwargs": None},
    ]
    file = written(tmp_path, *lines)
    chats = read(model, file)
    quiet, text, usual = (parts(model, one) for one in chats.samples)
    assert quiet == text == ("system: be brief\nuser: é?\nassistant: <no>yes", ["yes"])
    assert usual == ("system: be brief\nuser: é?\nassistant: yes", ["yes"])
    (endless,) = chats.notices
    assert endless.startswith(
        "chats in which no token that is learned ends a turn: 3; the model does not learn"
    )
    for theirs in ({"prompt": ASKED, "completion": [ANSWERED]}, {"conversations": SHAREGPT}):
        assert learned(model, tmp_path, {**theirs, "chat_template_kwargs": given}) == [quiet]
    for wrong, why in (
        (["enable_thinking"], r"chat_template_kwargs is \['enable_thinking'\]; write an object"),
        ({"tools": []}, "chat_template_kwargs has tools, which is no setting of a template; remove it"),
    ):
        with pytest.raises(ConfigError, match=f"line 1: {why}"):
            read(model, written(tmp_path, {"messages": CHAT, "chat_template_kwargs": wrong}))


def test_of_a_prompt_nothing_is_learned(chat_model: Path, tmp_path: Path) -> None:
    earlier = [*ASKED, {"role": "assistant", "content": "no"}, {"role": "user", "content": "sure?"}]
    after = [ANSWERED, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "42!"}]
    line = {"prompt": earlier, "completion": after}
    ((whole, covered),) = learned(chat_model, tmp_path, line)
    assert covered == [f"yes{END}", f"42!{END}"]
    assert whole == template_of(chat_model).render([*earlier, *after], (), False).rstrip()
    file = written(tmp_path, line)
    (sample,) = read(chat_model, file, roles=("assistant", "tool")).samples
    assert [text.rstrip() for text in parts(chat_model, sample)[1]] == [
        f"yes{END}", f"<|im_start|>tool\n42{END}", f"42!{END}",
    ]  # fmt: skip


def test_a_prompt_may_be_rewritten_by_the_template(chat_model: Path, tmp_path: Path) -> None:
    """As by one that shows the reasoning of the last turn alone."""
    model = tmp_path / "forgetful"
    shutil.copytree(chat_model, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% if loop.last and m.reasoning_content %}"
        "({{ m.reasoning_content }}){% endif %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    thought = {"role": "assistant", "reasoning_content": "hm", "content": "no"}
    chat = [*ASKED, thought, {"role": "user", "content": "sure?"}, thought]
    with pytest.raises(ConfigError, match="renders what comes before message 5 otherwise"):
        learned(model, tmp_path, {"messages": chat})
    ((whole, covered),) = learned(model, tmp_path, {"prompt": chat[:4], "completion": chat[4:]})
    assert whole == "system: be brief\nuser: é?\nassistant: no\nuser: sure?\nassistant: (hm)no"
    assert covered == ["(hm)no"]


def test_results_of_an_evaluation_are_prompts_with_completions(chat_model: Path, tmp_path: Path) -> None:
    said = [Message(**one) for one in CHAT]
    row = result_row(Task(index=3, data_json='{"answer": "yes"}'), Rollout(reward=1.0, messages=said))
    assert learned(chat_model, tmp_path, row) == learned(chat_model, tmp_path, {"messages": CHAT})


def test_of_a_completion_of_text_all_of_it_is_learned(chat_model: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "The sky is", "completion": " blue."},
        {"prompt": "2 + 2 =", "completion": f" 4{END}"},
        {"prompt": "Say nothing:", "completion": ""},
        {"prompt": "", "completion": "Once"},
    ]
    assert learned(chat_model, tmp_path, *lines) == [
        (f"The sky is blue.{END}", [f" blue.{END}"]),
        (f"2 + 2 = 4{END}", [f" 4{END}"]),
        (f"Say nothing:{END}", [END]),
        (f"Once{END}", [f"nce{END}"]),  # nothing stands before the first token
    ]


def test_an_end_that_nothing_stands_before_is_left_out(chat_model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": "", "completion": END}, {"prompt": "", "completion": "Once"})
    chats = read(chat_model, file)
    assert (len(chats.samples), chats.left_out) == (1, 1)


def test_of_a_text_all_but_the_first_token_is_learned(chat_model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, {"text": "Once"}, {"text": ""}, {"text": f"upon{END}"})
    chats = read(chat_model, file)
    found = [parts(chat_model, one) for one in chats.samples]
    assert found == [(f"Once{END}", [f"nce{END}"]), (f"upon{END}", [f"pon{END}"])]
    raw, empty = chats.notices
    assert raw.startswith("text: learned as raw text, without the chat template")
    assert empty == "lines left out, whose text is empty: 1"


def test_of_a_long_text_every_token_is_learned_once(chat_model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, {"text": "abcdefg"}, {"text": "xy"})
    for most in range(2, 12):
        chats = read(chat_model, file, most=most)
        assert all(len(one.token_ids) <= most for one in chats.samples)
        covered = "".join(text for one in chats.samples for text in parts(chat_model, one)[1])
        assert covered == f"bcdefg{END}y{END}", most
        assert (chats.lines, chats.left_out) == (2, 0)
    assert read(chat_model, file, most=3).counted == "2 texts in 5 pieces"
    assert read(chat_model, file, most=8).counted == "2 texts"
    with pytest.raises(ConfigError, match="has no text of at most max_tokens = 1; longer: 2"):
        read(chat_model, file, most=1)
    with pytest.raises(
        ConfigError, match="has no text with anything that is learned before max_tokens = 1; "
    ):
        read_chats(file, chat_model, (), 1, overlong="cut")


def with_tokenizer(chat_model: Path, folder: Path, tokenizer: Tokenizer) -> Path:
    shutil.copytree(chat_model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_text_begins_as_the_tokenizer_begins_it(chat_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    begins = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_start|>", special_tokens=[begins]
    )
    tokenizer.enable_truncation(3)
    model = with_tokenizer(chat_model, tmp_path / "begins", tokenizer)
    assert learned(
        model, tmp_path, {"prompt": "a", "completion": "bcd"}, {"prompt": "", "completion": "b"}
    ) == [
        (f"<|im_start|>abcd{END}", [f"bcd{END}"]),
        (f"<|im_start|>b{END}", [f"b{END}"]),
    ]
    assert learned(model, tmp_path, {"text": "ab"}) == [(f"<|im_start|>ab{END}", [f"ab{END}"])]


def merging(chat_model: Path, folder: Path, *, prepend: bool) -> Path:
    """A tokenizer that knows "blue" as one token; with `prepend`, one that writes a space before any text."""
    vocabulary = {letter: number for number, letter in enumerate("▁skyblue.<|im_end|>")} | {
        "bl": 90,
        "ue": 91,
    }
    vocabulary |= {"blue": 92, END: 93}
    merges = [("b", "l"), ("u", "e"), ("bl", "ue")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    scheme = "always" if prepend else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([END])
    return with_tokenizer(chat_model, folder, tokenizer)


def test_a_token_across_the_boundary_is_split_as_the_model_meets_it(chat_model: Path, tmp_path: Path) -> None:
    model = merging(chat_model, tmp_path / "merging", prepend=False)
    file = written(tmp_path, {"prompt": "sky bl", "completion": "ue."})
    (sample,) = read(model, file).samples
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert [tokenizer.id_to_token(one) for one in sample.token_ids] == [
        "s",
        "k",
        "y",
        "▁",
        "bl",
        "ue",
        ".",
        END,
    ]
    assert (sample.spans[0].start, sample.spans[0].length) == (5, 3)


def test_where_it_cannot_be_split_it_is_refused(chat_model: Path, tmp_path: Path) -> None:
    model = merging(chat_model, tmp_path / "merging", prepend=True)
    well, ill = ({"prompt": "sky", "completion": " blue"}, {"prompt": "sky bl", "completion": "ue."})
    assert len(read(model, written(tmp_path, well)).samples) == 1
    with pytest.raises(ConfigError, match="line 2: prompt ends within a token"):
        read(model, written(tmp_path, well, ill))


def test_raw_text_needs_no_chat_template_and_an_end(chat_model: Path, tmp_path: Path) -> None:
    model = with_tokenizer(
        chat_model, tmp_path / "base", Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    )
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        read(model, written(tmp_path, {"messages": CHAT}))
    text = written(tmp_path, {"text": "Once"})
    assert len(read(model, text).samples) == 1
    (model / "tokenizer_config.json").write_text("{}")
    assert parts(model, read(model, text).samples[0])[0] == "Once<|im_end|>", "of the older form"
    (model / "special_tokens_map.json").unlink()
    with pytest.raises(ConfigError, match="names no eos_token"):
        read(model, text)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "."}}))
    assert parts(model, read(model, text).samples[0])[0] == "Once."


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"prompt": "x"}, 'it has prompt, and no completion; write "completion" beside it'),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "of two answers chosen may be it"),
        ({"completion": "x", "prompt": None}, "it has completion, and no prompt"),
        (
            {"prompt": ASKED, "completion": "x"},
            "only prompt is a list; write both as messages, or as text",
        ),
        ({"prompt": "x", "completion": CHAT}, "only completion is a list"),
        ({"prompt": "x", "completion": 5}, "completion is 5; write text, or a list of messages"),
        ({"prompt": [], "completion": CHAT}, r"prompt is \[\]; write a list of messages, of one at least"),
        ({"prompt": ["x"], "completion": CHAT}, "prompt, message 1 is 'x'; write an object"),
        ({"prompt": CHAT, "completion": ASKED}, "no message of assistant in its completion"),
        ({"text": 5}, "text is 5; write text"),
        ({"text": ["x"]}, r"text is \['x'\]; write text"),
        ({"text": "\ud800"}, "half a surrogate pair"),
        ({"conversations": "x"}, "conversations is 'x'; write a list of messages"),
        (
            {"conversations": [{"from": "wizard", "value": "x"}]},
            "the role 'wizard'; there are system, .* human, gpt",
        ),
        ({"conversations": [{"from": "human"}]}, 'message 1 has no value; write "value": "..."'),
        ({"conversations": [{"from": "human", "value": 5}]}, "message 1 has the content 5; write text"),
        (
            {"conversations": [{"from": "function_call", "value": "f(1)"}]},
            "message 1, value is text that is no JSON",
        ),
        (
            {"conversations": SHAREGPT, "system": "x"},
            "system stands beside conversations that begin with one",
        ),
        ({"conversations": SHAREGPT, "system": 5}, "system is 5; write text"),
        ({"instruction": "x", "input": "", "output": "y"}, "instruction and output have no form"),
        (
            {"question": "x", "answer": "y"},
            "the keys 'answer', 'question', which is no form that is read; write {",
        ),
        ({}, "it has no key with a value"),
        (5, "it is 5, and no object"),
    ],
)
def test_what_has_no_form_is_refused(chat_model: Path, tmp_path: Path, line: object, why: str) -> None:
    with pytest.raises(ConfigError, match=f"chats.jsonl, line 1: .*{why}"):
        read(chat_model, written(tmp_path, line))


def test_forms_are_not_mixed(chat_model: Path, tmp_path: Path) -> None:
    lines = [{"messages": CHAT}, {"text": "x"}, {"messages": SHAREGPT}, {"prompt": "x", "completion": "y"}]
    with pytest.raises(ConfigError) as caught:
        read(chat_model, written(tmp_path, "", *lines))
    assert [line.split(": ", 1)[1].split("; ")[0] for line in str(caught.value).splitlines()] == [
        "it has text, and line 2 has messages",
        "line 5: it has prompt and completion, which are text, and line 2 has messages",
    ]


def test_a_list_is_read_with_the_lines_of_its_items(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    file.write_text("\ufeff" + json.dumps([{"text": "Once"}, {"text": "upon [a] time"}], indent=2))
    assert [parts(chat_model, one)[0] for one in read(chat_model, file).samples] == [
        f"Once{END}",
        f"upon [a] time{END}",
    ]
    file.write_text(json.dumps([{"text": "Once"}, {"text": 5}, {"texts": ""}], indent=2))
    with pytest.raises(ConfigError) as caught:
        read(chat_model, file)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{file}, line 5: text is 5") and second.startswith(
        "  also: line 8: it has the keys"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[{"text": "x"},\n{"text": }]', "line 2: an item of the list is no JSON"),
        ('[{"text": "x"}', "behind the item of line 1 the list has no comma, and no end"),
        ('[\n{"text": "x"}\n{"text": "y"}]', "behind the item of line 2 the list has no comma"),
        ('[{"text": "x"}]\n{"text": "y"}', "something stands behind the end of the list"),
        ("[]", "has no chat"),
    ],
)
def test_a_broken_list_is_refused(chat_model: Path, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "chats.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^data = '.*chats.json'.*{why}"):
        read(chat_model, tmp_path / "chats.json")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"PAR1\x15\x04", "is Parquet that cannot be read: Parquet file size is 6 bytes"),
        (b"ARROW1\x00\x00", "is Arrow that cannot be read: "),
        (b"\xff\xff\xff\xff\x10", "is Arrow that cannot be read: "),
        (b"PK\x03\x04", "is an archive; take the files out of it: unzip '.*chats.data'"),
        (b"\x80\x02", "is not UTF-8 at byte 0"),
        (b'{"text": "x"}\n\xe2\x82\xac\x80', "is not UTF-8 at byte 17"),
    ],
)
def test_a_file_that_is_none_of_data_is_refused(
    chat_model: Path, tmp_path: Path, content: bytes, why: str
) -> None:
    file = tmp_path / "chats.data"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^data = '.*chats.data' {why}"):
        read(chat_model, file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(chat_model, tmp_path / "absent")


def test_validation_is_read_alike_in_a_form_of_its_own(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def accepts(specs: object) -> None:
        """The trainer would."""

    monkeypatch.setattr(command, "check", accepts)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    data = written(tmp_path / "a", {"prompt": "a", "completion": "b", "label": True})
    file = written(tmp_path / "b", {"text": "abc"})
    asked = ["sft", "--model", str(chat_model), "--data", str(data), "--validation", str(file), "--dry-run"]
    assert main(asked) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "# 1 completion, 2 tokens to learn, 0 left out as too long; 1 step"
    assert said[1].startswith("# prompt and completion, which are text: learned as raw text")
    assert said[2:4] == [
        "# ignored keys of the data: label",
        "# validation: 1 text, 3 tokens to measure, 0 left out as too long",
    ]
    file = written(tmp_path / "b", {"text": "abc"}, {"messages": CHAT})
    assert main(asked) == 2
    assert f"{file}, line 2: it has messages, and line 1 has text" in capsys.readouterr().err
