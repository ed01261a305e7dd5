"""A line of `quartet sft` is rendered as inference renders the request that says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.messages import message_row
from quartet.cli.sft.line import Conversation, read_line
from quartet.cli.sft.template import template_of
from quartet.cli.tiny.files import write_model_files
from quartet.v1.common_pb2 import Message, ToolCall, ToolDefinition
from quartet_inference.chat.template import Template
from quartet_inference.chat.tokenizer import load_tokenizer
from quartet_inference.messages import to_template, tool_to_template

# All that a template is given.
TELLS_ALL = (
    "{{ tools | tojson }}{{ documents | tojson }}{% for m in messages %}"
    "{% for key in m | sort %}{{ key }}={{ m[key] | tojson }};{% endfor %}\n{% endfor %}"
    "{{ add_generation_prompt }}"
)
# How Qwen 3 prints tools and their calls.
PRINTS_TOOLS = (
    "{%- if tools %}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{{- m.role + m.content }}{%- for call in m.tool_calls or [] %}"
    "{%- if call.function %}{%- set call = call.function %}{%- endif %}{{- call.name }}"
    "{%- if call.arguments is string %}{{- call.arguments }}"
    "{%- else %}{{- call.arguments | tojson }}{%- endif %}{%- endfor %}{%- endfor %}"
)
# How DeepSeek-V3 prints calls, whose arguments it takes as text alone.
TAKES_TEXT = (
    "{%- for m in messages %}{{- m.role + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- call.function.name + '\n' + call.function.arguments }}{%- endfor %}{%- endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "<where>"}}}
MESSAGES = [
    Message(role="system", content="be brief"),
    Message(role="user", content="é?"),
    Message(
        role="assistant",
        reasoning_content="so",
        tool_calls=[
            ToolCall(id="a", name="weather", arguments_json='{"city": "Zürich", "n": 1.50}'),
            ToolCall(id="b", name="now", arguments_json="{no json"),
        ],
    ),
    Message(role="tool", content="42", tool_call_id="a", name="weather"),
    Message(role="tool", content="", tool_call_id="b"),
    Message(role="assistant", content="<42>"),
]
TOOLS = [
    ToolDefinition(name="weather", description="looks", parameters_json=json.dumps(SCHEMA)),
    ToolDefinition(name="now", strict=True),
]
LINE = {
    "messages": [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        },
        {"role": "user", "content": "é?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "so",
            "tool_calls": [
                {
                    "function": {"arguments": '{"city": "Zürich", "n": 1.50}', "name": "weather"},
                    "type": "function",
                    "id": "a",
                    "index": 0,
                },
                {"id": "b", "name": "now", "arguments": "{no json"},
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "a", "name": "weather"},
        {"role": "tool", "content": None, "tool_call_id": "b"},
        {"role": "assistant", "content": "<42>", "tool_calls": []},
    ],
    "tools": [
        {"function": {"parameters": SCHEMA, "description": "looks", "name": "weather"}, "type": "function"},
        {"name": "now", "strict": True, "description": None},
    ],
}
ROLLOUT = {"messages": [message_row(message) for message in MESSAGES], "tools": LINE["tools"]}


@pytest.mark.parametrize("source", [TELLS_ALL, PRINTS_TOOLS])
@pytest.mark.parametrize("line", [LINE, ROLLOUT, LINE | {"tools": json.dumps(LINE["tools"])}])
@pytest.mark.parametrize("listed", [True, False])
def test_a_line_is_rendered_as_it_is_served(
    tmp_path: Path, source: str, line: dict[str, object], listed: bool
) -> None:
    write_model_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    chat = read_line(json.loads(json.dumps(line if listed else line | {"tools": []})))
    assert isinstance(chat, Conversation)
    served = Template(load_tokenizer(tmp_path), {})
    messages = [to_template(message) for message in MESSAGES]
    tools = [tool_to_template(tool) for tool in TOOLS] if listed else []
    for end in range(1, len(messages) + 1):
        for opened in (True, False):
            ours = template_of(tmp_path).render(chat.messages[:end], chat.tools, opened)
            assert ours == served.render(messages[:end], tools, opened)


def test_where_a_template_takes_arguments_as_text_alone_they_are(tmp_path: Path) -> None:
    write_model_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TAKES_TEXT)
    calls = [
        ToolCall(id="a", name="weather", arguments_json=text) for text in ('{"city":"Zürich"}', "{no json")
    ]
    said = [Message(role="user", content="é?")]
    said += [Message(role="assistant", content="so", tool_calls=[call]) for call in calls]
    chat = read_line({"messages": [message_row(message) for message in said]})
    assert isinstance(chat, Conversation)
    served = Template(load_tokenizer(tmp_path), {}).render([to_template(message) for message in said], [])
    assert template_of(tmp_path).render(chat.messages, [], True) == served
    assert served == 'useré?assistantsoweather\n{"city": "Zürich"}assistantsoweather\n{no json'


@pytest.mark.parametrize("added", [None, {}, {"256": {"content": "<|endoftext|>", "special": True}}])
def test_a_template_may_print_every_token_that_the_folder_names(
    tmp_path: Path, added: dict[str, Any] | None
) -> None:
    """Not only those that most folders name; of an older form by a file of its own."""
    older = added is None
    write_model_files(tmp_path)
    names = ("bos_token", "eos_token", "sep_token", "cls_token", "image_token", "add_bos_token")
    (tmp_path / "chat_template.jinja").write_text("".join(f"{{{{ {name} }}}}|" for name in names))
    file = tmp_path / "tokenizer_config.json"
    more = {
        "sep_token": {"__type": "AddedToken", "content": "<answer>"},
        "extra_special_tokens": {"image_token": "<think>"},
    }
    more |= {"cls_token": None, "add_bos_token": True}
    more |= {} if older else {"added_tokens_decoder": added}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<guess>"}))
    said = [{"role": "user", "content": "hi"}]
    served = Template(load_tokenizer(tmp_path), {}).render(said, [])
    assert template_of(tmp_path).render(said, (), True) == served
    assert served == f"{'<guess>' if older else ''}|<|im_end|>|<answer>||<think>||"
