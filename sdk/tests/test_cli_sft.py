"""`quartet sft`: what of a chat is learned, what is refused, how many steps there are."""

from __future__ import annotations

import errno
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quartet.cli import held
from quartet.cli.__main__ import main
from quartet.cli.outputs import rollout_row
from quartet.cli.sft import command, steps
from quartet.cli.sft.chats import batches, read_chats, sample_of
from quartet.cli.sft.line import Conversation
from quartet.cli.sft.place import Calls, begun_ms, cut_metrics, taken
from quartet.cli.sft.requests import frames, run_spec
from quartet.cli.sft.steps import Refused, Training
from quartet.cli.sft.template import template_of
from quartet.cli.sft.validation import Validation
from quartet.cli.tiny.files import PHRASES, write_model_files
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.folder import lock_file
from quartet.run.lora import LoraConfig
from quartet.run.sft import MeasureConfig, SftConfig
from quartet.run.wandb import WandbConfig
from quartet.v1.common_pb2 import Message, ToolCall
from quartet.v1.orchestrator_service_pb2 import RolloutEvent
from quartet.v1.rollout_pb2 import FAILURE_KIND_TIMEOUT, Rollout, RolloutFailure, Sample
from tokenizers import Tokenizer

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "yes  "},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "no"},
]
CONVERSATION = Conversation(CHAT, (), frozenset())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "model"
    write_model_files(path, PHRASES)
    return path


def parts(folder: Path, sample: Sample) -> tuple[str, list[str]]:
    """The text of all tokens, and that of each span."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    ids = list(sample.token_ids)
    return text(ids), [text(ids[span.start : span.start + span.length]) for span in sample.spans]


def sample(folder: Path, *roles: str) -> Sample:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return sample_of(CONVERSATION, roles, template_of(folder), tokenizer)


def test_the_assistants_turns_are_learned_to_their_ends(folder: Path) -> None:
    whole, covered = parts(folder, sample(folder, "assistant"))
    assert covered == ["yes  <|im_end|>", "no<|im_end|>"]
    assert whole == template_of(folder).render(CHAT, (), False).rstrip()


def test_other_roles_are_learned_where_they_are_chosen(folder: Path) -> None:
    _, covered = parts(folder, sample(folder, "user", "tool"))
    assert covered == ["<|im_start|>user\né?<|im_end|>", "<|im_start|>tool\n42<|im_end|>"]
    with pytest.raises(ValueError, match="the first token of a chat"):
        sample(folder, "system")


def test_what_a_template_rewrites_is_refused(folder: Path, tmp_path: Path) -> None:
    forgetful = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(forgetful)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="keeps earlier turns"):
        sample_of(CONVERSATION, ("assistant",), template_of(tmp_path), tokenizer)


def written(tmp_path: Path, *lines: object) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return file


def test_a_file_is_read_and_long_chats_are_counted(folder: Path, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]
    file = written(tmp_path, {"messages": CHAT}, "", {"messages": long})
    chats = read_chats(file, folder, ("assistant",), 200)
    assert (len(chats.samples), chats.left_out) == (1, 1)
    assert len(read_chats(file, folder, ("assistant",), 4096).samples) == 2


def said(**fields: object) -> object:
    """A line whose second message has these fields."""
    return {"messages": [CHAT[1], {"role": "assistant", "content": "x", **fields}]}


def test_any_text_stays_within_its_line(folder: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "assistant", "content": "d"}]
    file = written(tmp_path, json.dumps({"messages": chat}, ensure_ascii=False), {"messages": CHAT})
    assert len(read_chats(file, folder, ("assistant",), 4096).samples) == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: not a chat"),
        ("[" * 100_000, "line 2: not a chat"),
        ([], "line 2: not a chat"),
        ({"messages": "x"}, "line 2: not a chat"),
        ({"messages": ["x"]}, "line 2: not a chat: message 1"),
        ({"text": "x"}, "line 2: not a chat"),
        ({"messages": []}, "line 2: not a chat"),
        ({"messages": [{"role": "user"}]}, "line 2: not a chat"),
        ({"messages": CHAT[:2]}, "line 2: no message of assistant"),
        (said(role="wizard"), "message 2 has the role 'wizard'; there are system, user, assistant, tool"),
        (said(role=["user"]), r"message 2 has the role \['user'\]"),
        (said(content=5), "line 2: message 2 has the content 5"),
        (said(content=None), "line 2: not a chat: message 2 has no content"),
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
def test_lines_that_are_no_chats_are_refused(folder: Path, tmp_path: Path, line: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_chats(written(tmp_path, {"messages": CHAT}, line), folder, ("assistant",), 4096)


def test_malformed_lines_are_told_together(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").touch()
    wizards = [said(role=f"wizard {number}") for number in range(23)]
    data = written(tmp_path, {"messages": CHAT}, "{", *wizards, said(content=5))
    assert main(["sft", "--model", str(folder), "--data", str(data)]) == 2
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {data}, line 2: not a chat")
    numbers = [int(line.removeprefix("  also: line ").split(":")[0]) for line in others]
    assert numbers == list(range(3, 22)) and last == "  and 5 more"


def test_what_the_template_cannot_render_is_told_with_its_line(folder: Path, tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not so') }}"
        "{% elif m.content == 'worse' %}{{ m.nothing | tojson }}{% endif %}{{ m.content }}|{% endfor %}"
    )
    model = with_template(folder, tmp_path, strict)
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


def with_template(folder: Path, tmp_path: Path, template: str) -> Path:
    """A model folder with this template."""
    model = tmp_path / "other"
    model.mkdir()
    (model / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text(template)
    return model


def texts(model: Path, file: Path) -> list[str]:
    """What is trained on, chat by chat."""
    return [parts(model, one)[0] for one in read_chats(file, model, ("assistant",), 4096).samples]


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
def test_a_templates_tools_are_those_of_the_line(folder: Path, tmp_path: Path, tools: object) -> None:
    model = with_template(folder, tmp_path, TOOL_TEMPLATE)
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
def test_arguments_are_encoded_once(folder: Path, tmp_path: Path, call: object) -> None:
    model = with_template(folder, tmp_path, TOOL_TEMPLATE)
    (text,) = texts(model, written(tmp_path, said(content=None, tool_calls=[call])))
    assert text.endswith('assistant\nf({"x": "é"})<|im_end|>')


def test_arguments_that_are_no_json_stay_as_they_were_written(folder: Path, tmp_path: Path) -> None:
    model = with_template(folder, tmp_path, TOOL_TEMPLATE)
    calls = [{"name": "f", "arguments": "{x"}, {"name": "g", "arguments": '"\\ud800"'}]
    (text,) = texts(model, written(tmp_path, said(content="", tool_calls=calls)))
    assert text.endswith('assistant\nf("{x")g("\\"\\\\ud800\\"")<|im_end|>')


def test_parts_of_text_are_joined_and_names_of_the_same_are_one(folder: Path, tmp_path: Path) -> None:
    model = with_template(folder, tmp_path, TOOL_TEMPLATE)
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
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").touch()

    async def accepts(specs: object) -> None:
        """The trainer would."""

    monkeypatch.setattr(command, "check", accepts)
    line = said(weight=0, audio=None) | {"id": 7, "source": "web", "split": None}
    data = written(tmp_path, line, line)
    assert main(["sft", "--model", str(folder), "--data", str(data), "--dry-run"]) == 0
    _, *notices = capsys.readouterr().out.splitlines()
    assert notices == ["ignored keys of the data: id, messages[].weight, source"]


def test_rollouts_are_read_as_they_are_written(folder: Path, tmp_path: Path) -> None:
    call = ToolCall(id="1", name="f", arguments_json='{"x": 1}')
    messages = [
        Message(role="user", content="?"),
        Message(role="assistant", reasoning_content="so", tool_calls=[call]),
        Message(role="tool", content="42", tool_call_id="1"),
        Message(role="assistant", content="42"),
    ]
    failed = Rollout(messages=messages[:1], failure=RolloutFailure(kind=FAILURE_KIND_TIMEOUT))
    rollouts = [Rollout(messages=messages), Rollout(), Rollout(), failed]
    file = written(
        tmp_path, *({"event": 1, **rollout_row(RolloutEvent(step=1, rollout=one))} for one in rollouts)
    )
    model = with_template(folder, tmp_path, TOOL_TEMPLATE)
    chats = read_chats(file, model, ("assistant",), 4096)
    assert [parts(model, one)[1] for one in chats.samples] == [
        ['<think>so</think>f({"x": 1})<|im_end|>', "42<|im_end|>"]
    ]
    without, failures, unlisted = chats.notices
    assert without.startswith("rollouts left out, without messages") and without.endswith(": 2")
    assert failures == "rollouts left out, failed: 1"
    assert "call tools and list none" in unlisted and ": 1; add" in unlisted


def test_rollouts_without_any_messages_say_so(folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path, rollout_row(RolloutEvent(rollout=Rollout())))
    with pytest.raises(ConfigError, match="messages_of_members"):
        read_chats(file, folder, ("assistant",), 4096)


def test_tools_that_the_template_never_prints_need_not_be_listed(folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path, said(tool_calls=[{"name": "f", "arguments": {}}]))
    assert read_chats(file, folder, ("assistant",), 4096).notices == []


def test_every_chat_comes_once_in_each_epoch(folder: Path) -> None:
    samples = [Sample(token_ids=[number]) for number in range(10)]
    drawn = [one.token_ids[0] for batch in islice(batches(samples, 5, 7), 4) for one in batch]
    assert Counter(drawn[:10]) == Counter(range(10)) == Counter(drawn[10:]) and drawn[:10] != drawn[10:]
    again = [one.token_ids[0] for batch in islice(batches(samples, 5, 7), 4) for one in batch]
    assert again == drawn


def test_steps_and_schedule(tmp_path: Path) -> None:
    config = SftConfig(model="m", data=tmp_path, epochs=2.0, batch_size=8, warmup_steps=3)
    assert config.steps(40) == 10 and run_spec(config, 40).optimizer.total_steps == 10
    assert SftConfig(model="m", data=tmp_path, batch_size=64).steps(10) == 1
    for epochs in (1e12, 1e308):
        with pytest.raises(ConfigError, match="at most 4294967295 can be counted"):
            SftConfig(model="m", data=tmp_path, epochs=epochs).steps(400)
    with pytest.raises(ValueError, match="give one of the two"):
        SftConfig(model="m", data=tmp_path, epochs=2.0, max_steps=3)
    longest = SftConfig(model="m", data=tmp_path, warmup_steps=2**32 - 2)
    assert run_spec(longest, 8).optimizer.total_steps == 2**32 - 1
    with pytest.raises(ValueError, match="warmup_steps"):
        SftConfig(model="m", data=tmp_path, warmup_steps=2**32 - 1)


def test_an_adapter_is_asked_for_as_by_a_run(tmp_path: Path) -> None:
    table = {"enabled": True, "r": 4, "alpha": 8.0, "use_rslora": True, "publish": "merged"}
    config = SftConfig(model="m", data=tmp_path, lora=table | {"modules_to_save": ["norm"]})
    asked = run_spec(config, 10).lora
    assert (asked.rank, asked.alpha, asked.rslora, list(asked.modules_to_save)) == (4, 8.0, True, ["norm"])
    assert not run_spec(SftConfig(model="m", data=tmp_path), 10).HasField("lora")
    with pytest.raises(ValueError, match="no part of a served adapter"):
        SftConfig(model="m", data=tmp_path, lora={"enabled": True, "modules_to_save": ["norm"]})
    with pytest.raises(ValueError, match="r is set, and the table is off"):
        SftConfig(model="m", data=tmp_path, lora={"r": 4})


def test_a_batch_is_the_mean_over_what_is_learned(folder: Path) -> None:
    first, *middle, last = frames([sample(folder, "assistant")] * 3, 5)
    covered = sum(span.length for span in sample(folder, "assistant").spans)
    assert (first.start.seq_id, first.start.normalizer) == (5, 3 * covered)
    assert sum(len(one.batch.samples) for one in middle) == last.commit.sample_count == 3


def test_the_command_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--model", str(tmp_path / "absent"), "--data", "x.jsonl"]) == 2
    assert "neither a folder here nor" in capsys.readouterr().err


def test_an_adapter_is_no_model_to_begin_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    assert main(["sft", "--model", str(folder / "adapter"), "--data", "x.jsonl"]) == 2
    told = f"it is an adapter; name the folder of a whole model, such as {str(folder)!r}"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "end",
    [OSError(errno.ENOSPC, "No space left on device"), QuartetError("NOT_READY", "the trainer is away")],
)
def test_whatever_ends_it_says_how_to_go_on(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: Exception,
) -> None:
    async def ends(*given: object) -> None:
        raise end

    (folder / "model.safetensors").touch()

    async def accepts(specs: object) -> None:
        """The trainer would."""

    monkeypatch.setattr(command, "check", accepts)
    monkeypatch.setattr(command, "_train", ends)
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    arguments = ["--model", str(folder), "--data", str(data), "--output-dir", str(output)]
    assert main(["sft", *arguments]) == 1
    kept, error = capsys.readouterr().err.splitlines()
    assert kept.endswith(f"go on with --resume --output-dir {output}")
    assert error in ("error: No space left on device", "error: NOT_READY: the trainer is away")


@given(steps=st.integers(1, 60), interval=st.integers(1, 20))
def test_promise_1_the_last_call_says_which_step_comes_next(steps: int, interval: int) -> None:
    calls = Calls(steps, interval)
    applied = 0
    for step in range(steps):
        assert calls.first_of(step) == applied + 1
        applied += 2
        if calls.saves_after(step):
            applied += 1
            assert calls.step_after(applied) == step + 1
    assert calls.step_after(0) == 0
    assert calls.last == applied + 1 and calls.step_after(calls.last) == steps


def test_promise_2_a_folder_goes_on_as_it_was_begun_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    config = SftConfig(model=str(folder), data=data)

    def begin(output: Path, config: SftConfig) -> None:
        with taken(output, config, resume=False):
            pass

    def go_on(output: Path, config: SftConfig) -> None:
        with taken(output, config, resume=True):
            pass

    with pytest.raises(ConfigError, match="holds no fine-tuning"):
        go_on(output, config)
    assert not output.exists(), "a refusal leaves nothing"
    begin(output, config)
    with pytest.raises(ConfigError, match="add --resume"):
        begin(output, config)
    go_on(output, config)
    shown = {"trainer": {"threads": 2}, "wandb": WandbConfig(project="p")}
    go_on(output, config.model_copy(update=shown))
    with pytest.raises(
        ConfigError, match=r"another batch_size \(32, and not 5\); give what it was begun with"
    ):
        go_on(output, config.model_copy(update={"batch_size": 5}))
    with pytest.raises(ConfigError, match=r"another lora\.enabled \(false, and not true\)"):
        go_on(output, config.model_copy(update={"lora": LoraConfig(enabled=True)}))
    data.write_text(json.dumps({"messages": CHAT[1:]}))
    with pytest.raises(ConfigError, match="another contents of data"):
        go_on(output, config)
    written(tmp_path, {"messages": CHAT})
    (output / "checkpoint").mkdir()
    with pytest.raises(ConfigError, match="is complete"):
        go_on(output, config)


def test_promise_2_so_is_the_validation_set(folder: Path, tmp_path: Path) -> None:
    data, validation, output = written(tmp_path, {"messages": CHAT}), tmp_path / "val.jsonl", tmp_path / "out"
    validation.write_text("{}")
    config = SftConfig(model=str(folder), data=data, validation=validation)
    with taken(output, config, resume=False):
        pass
    assert begun_ms(output) > 1_700_000_000_000
    with taken(output, config.model_copy(update={"eval": MeasureConfig(interval=3)}), resume=True):
        pass
    validation.write_text("{} ")
    with (
        pytest.raises(ConfigError, match="another contents of validation"),
        taken(output, config, resume=True),
    ):
        pass
    without = config.model_copy(update={"validation": None})
    with (
        pytest.raises(ConfigError, match="another contents of validation"),
        taken(output, without, resume=True),
    ):
        pass


def test_promise_2_what_an_earlier_release_began_goes_on(folder: Path, tmp_path: Path) -> None:
    """It did not write down what it did not know."""
    config = SftConfig(model=str(folder), data=written(tmp_path, {"messages": CHAT}), seed=3)
    output = tmp_path / "out"
    with taken(output, config, resume=False):
        pass
    record = json.loads((output / "run.json").read_text())
    for key in ("run_id", "begun_ms", "lora", "validation", "contents of validation"):
        del record[key]
    (output / "run.json").write_text(json.dumps(record))
    with taken(output, config, resume=True):
        assert begun_ms(output) == 0
    adapter = config.model_copy(update={"lora": LoraConfig(enabled=True)})
    with pytest.raises(ConfigError, match=r"another lora\.enabled"), taken(output, adapter, resume=True):
        pass


@pytest.mark.parametrize("line", ['{"event": 4, "st', '{"event": 4}', "[1]", '{"step": 1e400}'])
def test_promise_2_nor_where_its_metrics_are_damaged(folder: Path, tmp_path: Path, line: str) -> None:
    """A last line that is torn is no damage: it is cut off."""
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    config = SftConfig(model=str(folder), data=data)
    with taken(output, config, resume=False):
        pass
    (output / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with taken(output, config, resume=True):
        pass
    (output / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with (
        pytest.raises(ConfigError, match=r"metrics\.jsonl:2 (has no step|is no JSON object)"),
        taken(output, config, resume=True),
    ):
        pass


def test_promise_2_one_process_at_a_time(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = SftConfig(model=str(folder), data=written(tmp_path, {"messages": CHAT}))
    with (
        taken(output, config, resume=False),
        pytest.raises(ConfigError, match="belongs to a fine-tuning that is going on"),
        taken(output, config, resume=True),
    ):
        pass
    with taken(output, config, resume=True):
        assert sorted(entry.name for entry in output.iterdir()) == [".lock", "run.json"]


def test_promise_2_what_another_began_since_the_look_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "out" / "metrics.jsonl"

    def another_was_quicker(file: Path) -> IO[bytes]:
        theirs.write_text("their lines")
        return lock_file(file)

    monkeypatch.setattr(held, "lock_file", another_was_quicker)
    config = SftConfig(model=str(folder), data=written(tmp_path, {"messages": CHAT}))
    with pytest.raises(ConfigError, match="is not empty"), taken(tmp_path / "out", config, resume=False):
        pass
    assert theirs.read_text() == "their lines" and not (tmp_path / "out" / "run.json").exists()


async def test_a_large_model_has_time_to_load(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    async def still_loading(call: object, request: object, *, timeout_s: float, **_: object) -> None:
        allowed.append(timeout_s)
        raise QuartetError("NOT_READY", "the model is being loaded")

    monkeypatch.setattr(steps, "unary", still_loading)
    config = SftConfig(model=str(folder), data=tmp_path)
    with pytest.raises(QuartetError):
        await Training(Mock(), config, [Sample()], Validation((), MeasureConfig(), 1, 1), tmp_path).opened()
    assert allowed == [1800.0], "what the orchestrator allows"


def test_promise_3_lines_of_steps_that_come_again_are_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    cut_metrics(tmp_path, 0)
    assert not file.exists()
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_metrics(tmp_path, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    file.write_text('{"step": 0}\n{"step": 1}\n')
    cut_metrics(tmp_path, 1)
    assert file.read_text() == '{"step": 0}\n{"step": 1}\n'
    cut_metrics(tmp_path, 0)
    assert file.read_text() == "", "what was measured before the first step is measured again"


async def test_what_the_trainer_does_not_take_was_not_begun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(call: object, request: object, **_: object) -> None:
        raise QuartetError("INVALID_CONFIG", "lora.target_modules = 'q' is refused", key="lora", value="q")

    monkeypatch.setattr(steps, "unary", refuses)
    config = SftConfig(model=str(folder), data=written(tmp_path, {"messages": CHAT}))
    training = Training(Mock(), config, [Sample()], Validation((), MeasureConfig(), 1, 1), tmp_path)
    with pytest.raises(Refused, match="target_modules"):
        await training.opened()


@pytest.mark.parametrize("resume", [False, True])
def test_a_refused_run_takes_its_new_folder_with_it(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resume: bool,
) -> None:
    async def refuses(*given: object) -> None:
        raise Refused("lora.target_modules = 'q' is refused")

    async def accepts(specs: object) -> None:
        """The trainer's configuration."""

    (folder / "model.safetensors").touch()
    monkeypatch.setattr(command, "check", accepts)
    monkeypatch.setattr(command, "_train", refuses)
    data, output = written(tmp_path, {"messages": CHAT}), tmp_path / "out"
    if resume:
        config = SftConfig(model=str(folder), data=data)
        with taken(output, config, resume=False):
            pass
    arguments = ["--model", str(folder), "--data", str(data), "--output-dir", str(output)]
    assert main(["sft", *arguments, *(["--resume"] if resume else [])]) == 2
    assert capsys.readouterr().err == "error: lora.target_modules = 'q' is refused\n", "nothing was done"
    assert output.exists() is resume
