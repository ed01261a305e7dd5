"""`quartet sft`: what of a chat is learned, what lines are read, and which are refused."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.outputs import rollout_row
from quartet.cli.sft import command
from quartet.cli.sft.batches import Batching
from quartet.cli.sft.chats import read_chats
from quartet.cli.sft.rendered import Covering, sample_of
from quartet.cli.sft.template import template_of
from quartet.config import ConfigError
from quartet.run.sft import Learns
from quartet.v1.common_pb2 import Message, ToolCall
from quartet.v1.orchestrator_service_pb2 import RolloutEvent
from quartet.v1.rollout_pb2 import FAILURE_KIND_TIMEOUT, Rollout, RolloutFailure, RolloutPart, Sample
from sft_chats import CHAT, CONVERSATION, parts, sample, shelved, written
from tokenizers import Tokenizer


def test_the_assistants_turns_are_learned_to_their_ends(chat_model: Path) -> None:
    whole, covered = parts(chat_model, sample(chat_model, "assistant"))
    assert covered == ["yes  <|im_end|>", "no<|im_end|>"]
    assert whole == template_of(chat_model).render(CHAT, (), False).rstrip()


def test_other_roles_are_learned_where_they_are_chosen(chat_model: Path) -> None:
    _, covered = parts(chat_model, sample(chat_model, "user", "tool"))
    assert covered == ["<|im_start|>user\né?<|im_end|>", "<|im_start|>tool\n42<|im_end|>"]
    with pytest.raises(ValueError, match="it begins with system, and nothing stands before that"):
        sample(chat_model, "system")


def test_everything_is_the_whole_chat(chat_model: Path, tmp_path: Path) -> None:
    """rendered.py 3: of a prompt with a completion the completion, unless prompts are learned, too (4)."""
    rendered = template_of(chat_model).render(CHAT, (), False)
    file = written(tmp_path, {"messages": CHAT})
    (one,) = read_chats(file, chat_model, ("assistant",), 4096, learns="everything").samples
    begins = rendered[len("<|im_start|>") :]
    assert parts(chat_model, one) == (rendered, [begins])
    file = written(tmp_path, {"prompt": CHAT[:2], "completion": CHAT[2:]})
    (one,) = read_chats(file, chat_model, ("assistant",), 4096, learns="everything").samples
    given = template_of(chat_model).render(CHAT[:2], (), True)
    assert parts(chat_model, one) == (rendered, [rendered[len(given) :]])
    (one,) = read_chats(file, chat_model, (), 4096, learns="everything", learn_prompts=True).samples
    assert parts(chat_model, one) == (rendered, [begins])
    file = written(tmp_path, {"prompt": CHAT[1:3], "completion": CHAT[3:]})
    (one,) = read_chats(file, chat_model, ("assistant",), 4096, learn_prompts=True).samples
    assert parts(chat_model, one)[1] == ["yes  <|im_end|>", "no<|im_end|>"], "by roles, too"


def test_what_a_template_rewrites_is_refused(chat_model: Path, tmp_path: Path) -> None:
    forgetful = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(forgetful)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    with pytest.raises(ValueError, match="keeps earlier turns"):
        sample_of(CONVERSATION, Covering(("assistant",)), template_of(tmp_path), tokenizer)


def test_a_file_is_read_and_long_chats_are_counted(chat_model: Path, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]
    file = written(tmp_path, {"messages": CHAT}, "", {"messages": long})
    chats = read_chats(file, chat_model, ("assistant",), 200)
    assert (len(chats.samples), chats.left_out) == (1, 1)
    assert len(read_chats(file, chat_model, ("assistant",), 4096).samples) == 2


def said(**fields: object) -> object:
    """A line whose second message has these fields."""
    return {"messages": [CHAT[1], {"role": "assistant", "content": "x", **fields}]}


def test_any_text_stays_within_its_line(chat_model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "assistant", "content": "d"}]
    file = written(tmp_path, json.dumps({"messages": chat}, ensure_ascii=False), {"messages": CHAT})
    assert len(read_chats(file, chat_model, ("assistant",), 4096).samples) == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", r"line 2: it is no JSON \(.*\); write an object, whole in a line of its own"),
        ("[" * 100_000, "line 2: it is no JSON"),
        ([], r"line 2: it is \[\], and no object; write {\"messages\": "),
        ({"messages": "x"}, "line 2: messages is 'x'; write a list of messages"),
        ({"messages": ["x"]}, "line 2: message 1 is 'x'; write an object"),
        ({"messages": []}, r"line 2: messages is \[\]; write a list of messages, of one at least"),
        ({"messages": [{"role": "user"}]}, 'line 2: message 1 has no content; write "content": "..."'),
        ({"messages": CHAT, "images": ["x"]}, "line 2: it has images, and only text is learned"),
        ({"messages": CHAT[:2]}, "line 2: no message of assistant"),
        (said(role="wizard"), "message 2 has the role 'wizard'; there are system, user, assistant, tool"),
        (said(role=["user"]), r"message 2 has the role \['user'\]"),
        (said(content=5), "line 2: message 2 has the content 5"),
        (said(content=None), "line 2: message 2 has no content"),
        (said(content=["x"]), r"message 2, content\[0\] is 'x'; only text"),
        (
            said(content=[{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]),
            r"line 2: message 2, content\[1\] is image_url; only text",
        ),
        (said(content="\ud800"), "line 2: it has half a surrogate pair"),
        (said(reasoning_content=5), "message 2 has the reasoning_content 5"),
        (said(tool_calls={}), "message 2, tool_calls is {}; write a list"),
        (said(tool_calls=["f(1)"]), r"message 2, tool_calls\[0\] is text that is no JSON"),
        (said(tool_calls=[5]), r"message 2, tool_calls\[0\] is 5; write an object"),
        (said(tool_calls=[{"name": "f"}]), r"tool_calls\[0\] has the arguments None"),
        (said(tool_calls=[{"arguments": {}}]), r"tool_calls\[0\] has no name"),
        ({"messages": CHAT, "tools": "f"}, "line 2: tools is text that is no JSON"),
        ({"messages": CHAT, "tools": {}}, "line 2: tools is {}; write a list"),
        ({"messages": CHAT, "tools": ["f"]}, r"line 2: tools\[0\] is 'f'"),
        ({"messages": CHAT, "tools": [{"name": "f", "input_schema": {}}]}, r"tools\[0\] has 'input_schema'"),
        ({"messages": CHAT, "tools": [{"name": "f", "parameters": []}]}, r"tools\[0\].parameters is \[\]"),
    ],
)
def test_lines_that_are_no_chats_are_refused(
    chat_model: Path, tmp_path: Path, line: object, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        read_chats(written(tmp_path, {"messages": CHAT}, line), chat_model, ("assistant",), 4096)


@pytest.mark.parametrize(
    ("roles", "first", "why"),
    [
        (
            ("assistant",),
            2,
            "it begins with assistant, and nothing stands before that to predict its first token; put a "
            "system or user message before it",
        ),
        (("user", "assistant"), 1, "it begins with user, .*; put a system message before it"),
        (("system", "user", "assistant"), 1, "it begins with user, .*; leave user out of roles"),
    ],
)
def test_a_chat_that_begins_with_what_is_learned_is_refused(
    chat_model: Path, tmp_path: Path, roles: tuple[str, ...], first: int, why: str
) -> None:
    file = written(tmp_path, {"messages": CHAT[first:]})
    with pytest.raises(ConfigError, match=f"chats.jsonl, line 1: {why}"):
        read_chats(file, chat_model, roles, 4096)


def test_a_first_token_that_the_template_leaves_nothing_before_is_refused(
    chat_model: Path, tmp_path: Path
) -> None:
    model = with_template(
        chat_model, tmp_path, "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"
    )
    with pytest.raises(ConfigError, match="line 1: the chat template shows nothing before what is learned"):
        read_chats(written(tmp_path, {"messages": CHAT}), model, ("user",), 4096)


def test_malformed_lines_are_told_together(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wizards = [said(role=f"wizard {number}") for number in range(23)]
    data = written(tmp_path, {"messages": CHAT}, "{", *wizards, said(content=5))
    assert main(["sft", "--model", str(chat_model), "--data", str(data)]) == 2
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {data}, line 2: it is no JSON")
    numbers = [int(line.removeprefix("  also: line ").split(":")[0]) for line in others]
    assert numbers == list(range(3, 22)) and last == "  and 5 more"


def test_what_the_template_cannot_render_is_told_with_its_line(chat_model: Path, tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not so') }}"
        "{% elif m.content == 'worse' %}{{ m.nothing | tojson }}{% endif %}{{ m.content }}|{% endfor %}"
    )
    model = with_template(chat_model, tmp_path, strict)
    file = written(tmp_path, {"messages": CHAT}, said(content="bad"), said(content="worse"))
    with pytest.raises(ConfigError) as caught:
        read_chats(file, model, ("assistant",), 4096)
    assert str(caught.value).splitlines() == [
        f"{file}, line 2: the chat template refuses it: not so",
        "  also: line 3: the chat template refuses it: Object of type Undefined is not JSON serializable",
    ]


TOOL_TEMPLATE = (
    "{% if tools is not none %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}


def with_template(chat_model: Path, tmp_path: Path, template: str) -> Path:
    """A model folder with this template."""
    model = tmp_path / "other"
    model.mkdir()
    (model / "tokenizer.json").write_text((chat_model / "tokenizer.json").read_text())
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text(template)
    return model


def texts(model: Path, file: Path) -> list[str]:
    """What is trained on, chat by chat."""
    return [parts(model, one)[0] for one in read_chats(file, model, ("assistant",), 4096).samples]


def test_what_a_template_marks_for_trl_is_printed(chat_model: Path, tmp_path: Path) -> None:
    """SmolLM3's, and those that are patched for assistant_only_loss."""
    marked = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = with_template(chat_model, tmp_path, marked)
    (one,) = read_chats(written(tmp_path, {"messages": CHAT[:3]}), model, ("assistant",), 4096).samples
    assert parts(model, one)[1] == ["yes  <|im_end|>"]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    text = theirs.apply_chat_template(CHAT[:3], chat_template=marked, tokenize=False)
    assert template_of(model).render(CHAT[:3], (), False) == text


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": FUNCTION}],
        [FUNCTION],
        [{"name": "f", "parameters": None, "strict": True}],
        [{"type": "function", "function": {"name": "f", "parameters": json.dumps(FUNCTION["parameters"])}}],
        json.dumps([FUNCTION]),
    ],
)
def test_a_templates_tools_are_those_of_the_line(chat_model: Path, tmp_path: Path, tools: object) -> None:
    model = with_template(chat_model, tmp_path, TOOL_TEMPLATE)
    with_tools, without, empty = texts(
        model, written(tmp_path, said() | {"tools": tools}, said(), said() | {"tools": []})
    )
    assert with_tools == json.dumps({"type": "function", "function": FUNCTION}) + "\n" + without
    assert empty == without


@pytest.mark.parametrize(
    "call",
    [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}},
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}},
        {"name": "f", "arguments": {"x": "é"}},
        json.dumps({"id": "1", "name": "f", "arguments": '{"x": "é"}'}),
    ],
)
def test_arguments_are_encoded_once(chat_model: Path, tmp_path: Path, call: object) -> None:
    model = with_template(chat_model, tmp_path, TOOL_TEMPLATE)
    (text,) = texts(model, written(tmp_path, said(content=None, tool_calls=[call])))
    assert text.endswith('assistant\nf({"x": "é"})<|im_end|>')


def test_arguments_that_are_no_json_stay_as_they_were_written(chat_model: Path, tmp_path: Path) -> None:
    model = with_template(chat_model, tmp_path, TOOL_TEMPLATE)
    calls = [{"name": "f", "arguments": "{x"}, {"name": "g", "arguments": '"\\ud800"'}]
    (text,) = texts(model, written(tmp_path, said(content="", tool_calls=calls)))
    assert text.endswith('assistant\nf("{x")g("\\"\\\\ud800\\"")<|im_end|>')


def test_parts_of_text_are_joined_and_names_of_the_same_are_one(chat_model: Path, tmp_path: Path) -> None:
    model = with_template(chat_model, tmp_path, TOOL_TEMPLATE)
    in_parts = {"type": "text", "text": "be "}, {"type": "text", "text": "brief", "image_url": None}
    asked = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "x"}
    chats = [
        [{"role": "developer", "content": list(in_parts)}, asked, answer | {"reasoning": "so"}],
        [{"role": "system", "content": "be brief"}, asked, answer | {"reasoning_content": "so"}],
    ]
    one, other = texts(model, written(tmp_path, *({"messages": chat} for chat in chats)))
    assert one == other and one.endswith("<think>so</think>x<|im_end|>")


def test_other_keys_are_said_once(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    async def accepts(specs: object) -> None:
        """The trainer would."""

    monkeypatch.setattr(command, "check", accepts)
    line = said(audio=None, refusal="no") | {"id": 7, "source": "web", "split": None}
    data = written(tmp_path, line, line)
    assert main(["sft", "--model", str(chat_model), "--data", str(data), "--dry-run"]) == 0
    said_of_it, _, _ = capsys.readouterr().out.partition("\n\n")
    assert said_of_it.splitlines()[1:] == ["# ignored keys of the data: id, messages[].refusal, source"]


def test_a_message_of_weight_0_is_not_learned(chat_model: Path, tmp_path: Path) -> None:
    """message.py 3, in each form of a chat; weights are OpenAI's, 0 and 1."""
    turns = [{**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}]
    shared = [{"from": one["role"], "value": one["content"], "weight": one.get("weight")} for one in turns]
    asked = {"from": "human", "value": "é?"}
    rendered = template_of(chat_model).render(CHAT, (), False).rstrip()
    for line in (
        {"messages": [*CHAT[:2], *turns]},
        {"prompt": CHAT[:2], "completion": turns},
        {"conversations": [asked, *shared], "system": "be brief"},
    ):
        (one,) = read_chats(written(tmp_path, line), chat_model, ("assistant",), 4096).samples
        assert parts(chat_model, one) == (rendered, ["no<|im_end|>"])
    with pytest.raises(ConfigError, match="no message of assistant that has another weight than 0, which"):
        read_chats(written(tmp_path, said(weight=0)), chat_model, ("assistant",), 4096)
    with pytest.raises(ConfigError, match=r"message 2 has the weight 0\.5; write 0 where it is not learned"):
        read_chats(written(tmp_path, said(weight=0.5)), chat_model, ("assistant",), 4096)
    [told] = read_chats(written(tmp_path, said(weight=0)), chat_model, (), 4096, learns="everything").notices
    assert told.startswith('messages of weight 0, which learns = "everything" learns all the same: line 1 (m')


@pytest.mark.parametrize("arguments", ["{x", "[1]", '"x"'])
def test_calls_that_are_learned_and_malformed_are_said(
    chat_model: Path, tmp_path: Path, arguments: str
) -> None:
    def told(**fields: object) -> list[str]:
        calling = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}], **fields}
        line = {"messages": [CHAT[1], calling, CHAT[4]], "tools": [{"name": "f", "parameters": {}}]}
        notices = read_chats(written(tmp_path, line), chat_model, ("assistant",), 4096).notices
        return [one for one in notices if "no JSON object" in one]

    [said_of_it] = told()
    assert said_of_it.endswith(
        "line 1 (message 2); the model learns to call so: mend them, or give the message weight 0"
    )
    assert not told(weight=0)


def test_rollouts_are_read_as_they_are_written(chat_model: Path, tmp_path: Path) -> None:
    call = ToolCall(id="1", name="f", arguments_json='{"x": 1}')
    messages = [
        Message(role="user", content="?"),
        Message(role="assistant", reasoning_content="so", tool_calls=[call]),
        Message(role="tool", content="42", tool_call_id="1"),
        Message(role="assistant", content="42"),
    ]
    failed = Rollout(messages=messages[:1], failure=RolloutFailure(kind=FAILURE_KIND_TIMEOUT))
    played = Rollout(messages=messages * 2, parts=[RolloutPart(agent="blue"), RolloutPart(agent="red")])
    rollouts = [Rollout(messages=messages), Rollout(), Rollout(), failed, played]
    file = written(
        tmp_path, *({"event": 1, **rollout_row(RolloutEvent(step=1, rollout=one))} for one in rollouts)
    )
    model = with_template(chat_model, tmp_path, TOOL_TEMPLATE)
    chats = read_chats(file, model, ("assistant",), 4096)
    assert [parts(model, one)[1] for one in chats.samples] == [
        ['<think>so</think>f({"x": 1})<|im_end|>', "42<|im_end|>"]
    ]
    without, failures, several, unlisted = chats.notices
    assert several.startswith("rollouts left out, of several agents") and several.endswith(": 1")
    assert without.startswith("rollouts left out, without messages") and without.endswith(": 2")
    assert failures == "rollouts left out, failed: 1"
    assert "call tools and list none" in unlisted and ": 1; add" in unlisted


def test_rollouts_without_any_messages_say_so(chat_model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, rollout_row(RolloutEvent(rollout=Rollout())))
    with pytest.raises(ConfigError, match="messages_of_members"):
        read_chats(file, chat_model, ("assistant",), 4096)


def test_tools_that_the_template_never_prints_need_not_be_listed(chat_model: Path, tmp_path: Path) -> None:
    file = written(tmp_path, said(tool_calls=[{"name": "f", "arguments": {}}]))
    assert read_chats(file, chat_model, ("assistant",), 4096).notices == []


#: Shows tools, but not those of a line: whether there are any, as no more than a sentence.
HINTING = "{% if tools %}You may call tools.{% endif %}" + TOOL_TEMPLATE.partition("{% endif %}")[2]
#: Shows them behind the system message alone.
BEHIND_SYSTEM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for t in tools or [] if m.role == 'system' %}{{ t.function.name | upper }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "lines"),
    [(None, [2, 3]), (HINTING, [2, 3]), (TOOL_TEMPLATE, []), (BEHIND_SYSTEM, [3])],
    ids=["the model's", "hinting", "showing", "behind the system message"],
)
@pytest.mark.parametrize("learns", ["roles", "everything"])
def test_tools_that_the_template_does_not_show_are_said(
    chat_model: Path, tmp_path: Path, template: str | None, lines: list[int], learns: Learns
) -> None:
    model = with_template(chat_model, tmp_path, template) if template else chat_model
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "f"}]
    tools = [FUNCTION, FUNCTION | {"name": "g"}]
    file = written(
        tmp_path,
        {"messages": asked},
        {"messages": CHAT, "tools": tools},
        {"messages": asked, "tools": tools},
        {"messages": asked, "tools": []},
    )
    places = ", ".join(f"line {line}" for line in lines)
    said_of_tools = (
        f"chats with tools that the chat template leaves out: {len(lines)}; the model never sees it: "
        f"{places}; use a template that shows it"
    )
    chats = read_chats(file, model, ("assistant",), 4096, learns=learns)
    assert chats.notices == ([said_of_tools] if lines else [])


def test_every_chat_comes_once_in_each_epoch(chat_model: Path) -> None:
    samples = shelved(Sample(token_ids=[number]) for number in range(10))
    drawn = [number for batch in islice(Batching(5).drawn(samples, 7), 4) for number in batch]
    assert Counter(drawn[:10]) == Counter(range(10)) == Counter(drawn[10:]) and drawn[:10] != drawn[10:]
    again = [number for batch in islice(Batching(5).drawn(samples, 7), 4) for number in batch]
    assert again == drawn
