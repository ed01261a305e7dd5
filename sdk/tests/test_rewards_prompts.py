"""Rows of a data set as prompts (quartet.rewards.prompts, promises 1 to 4), and what of them is refused."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from quartet import task_data
from quartet.config import ConfigError
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.rewards import prompts as module
from quartet.rewards import shown
from quartet.rewards.prompts import MAX_PROMPT_BYTES, Prompts
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import common_pb2
from quartet.v1.reward_service_pb2 import GetPromptsResponse, RewardPrompt
from served_rewards import CHATS

USER = [{"role": "user", "content": "hi"}]
#: Chats take about 1 s of 100,000 and a data set 2 s, where nothing else runs.
AFFORDABLE_SECONDS = 20.0


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


def one(tokenizer: TextTokenizer, prompt: Any, **columns: Any) -> RewardPrompt:
    """The prompt of a row."""
    (found,) = Prompts("train_dataset", [{"prompt": prompt, **columns}], tokenizer).page(0, 1)
    return found


def refusal(tokenizer: TextTokenizer, rows: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Prompts("train_dataset", rows, tokenizer)
    return str(caught.value)


def test_promise_1_text_is_its_tokens(tokenizer: TextTokenizer) -> None:
    found = one(tokenizer, "Say <|im_end|> é")
    assert list(found.tokens.token_ids) == tokenizer.encode("Say <|im_end|> é")
    assert found.WhichOneof("prompt") == "tokens" and not found.tokens.tail_messages


def test_promise_1_messages_travel_as_they_are(tokenizer: TextTokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    written = {**call, "function": {"name": "g", "arguments": '{"x": NaN'}}
    found = one(
        tokenizer,
        [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "developer", "content": "", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call, written]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
            {"role": "assistant", "content": "so", "reasoning_content": "because"},
        ],
    )
    calls = [
        common_pb2.ToolCall(id="c1", name="f", arguments_json='{"x": 1}'),
        common_pb2.ToolCall(id="c1", name="g", arguments_json='{"x": NaN'),
    ]
    assert list(found.messages.messages) == [
        common_pb2.Message(role="system", content="ab"),
        common_pb2.Message(role="developer"),
        common_pb2.Message(role="assistant", tool_calls=calls),
        common_pb2.Message(role="tool", content="2", tool_call_id="c1", name="f"),
        common_pb2.Message(role="assistant", content="so", reasoning_content="because"),
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": 7}, '["prompt"] = 7 is refused: give text, or a list of messages, [{"role": "user"'),
        ({"prompt": None}, '["prompt"] = None is refused'),
        ({"prompt": []}, '["prompt"] = [] is refused'),
        ({"prompt": ""}, "[\"prompt\"] = '' has no tokens; give text"),
        ({"prompt": "\ud800"}, '["prompt"] has half a surrogate pair'),
        ({"prompt": ["hi"]}, '["prompt"][0] = \'hi\' is refused: give {"role": ..., "content": ...}'),
        (
            {"prompt": [{"from": "human", "value": "x"}]},
            '["prompt"][0]["role"] = None is refused: give one of',
        ),
        ({"prompt": [*USER, {"role": "usr", "content": "x"}]}, '["prompt"][1]["role"] = \'usr\' is refused'),
        ({"prompt": [{"role": "user"}]}, '["prompt"][0] has no content; give "content": "..."'),
        ({"prompt": [{"role": "user", "content": 5}]}, '["prompt"][0]["content"] = 5 is refused: give text'),
        ({"prompt": [{"role": "user", "content": "\udc00"}]}, '["content"] has half a surrogate pair'),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "[\"content\"][0] is a part of type 'image', and the model is given only text",
        ),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "[\"content\"][0] is 'x', and the model"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, '["content"][0]["text"] = None'),
        ({"prompt": [{**USER[0], "tool_calls": "f()"}]}, "[\"tool_calls\"] = 'f()' is refused: give a list"),
        ({"prompt": [{**USER[0], "tool_calls": [{"name": "f"}]}]}, "[\"tool_calls\"][0] = {'name': 'f'} is"),
        (
            {"prompt": [{**USER[0], "tool_calls": [{"function": {"name": "f", "arguments": {"x": {1}}}}]}]},
            '["tool_calls"][0]: its arguments have what JSON does not have',
        ),
        (
            {"prompt": [{**USER[0], "tool_calls": [{"function": {"name": "f"}}]}]},
            '["function"]["arguments"] = None is refused: give text',
        ),
        ({"question": "x", "id": 1}, "has no column 'prompt', but question, id; rename one"),
        (
            {"prompt": "x", "completions": 1},
            "has a column 'completions', by which functions get something else",
        ),
        ({"prompt": "x", "images": ["cat.png"]}, "['images'] is refused: a model is given only text"),
        ({"prompt": "x", "image": "cat.png"}, "['image'] is refused"),
        ("text", "= 'text' is refused: give a dict of columns, 'prompt' among them"),
    ],
)
def test_promise_2_what_is_wrong_with_a_row_is_said_with_its_place(
    tokenizer: TextTokenizer, row: Any, says: str
) -> None:
    told = refusal(tokenizer, [{"prompt": USER}, row])
    assert told.startswith("train_dataset[1]") and says in told, told


def test_promise_2_rows_that_are_wrong_are_told_together_and_some_of_many(tokenizer: TextTokenizer) -> None:
    told = refusal(tokenizer, [{"prompt": n} for n in range(100)])
    assert re.findall(r"train_dataset\[(\d+)\]", told) == ["0", "1", "2", "3", "4"]
    assert re.findall(r"train_dataset\[(\d+)\]", refusal(tokenizer, [*CHATS, {}, *CHATS, {}])) == ["20", "41"]


def test_promise_2_a_prompt_that_cannot_travel_is_refused(tokenizer: TextTokenizer) -> None:
    for prompt in ("é" * MAX_PROMPT_BYTES, [{"role": "user", "content": "x" * MAX_PROMPT_BYTES}]):
        assert "travel: shorten it" in refusal(tokenizer, [{"prompt": prompt}])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "train_dataset has no rows; give one at least"),
        (
            {"train": CHATS},
            'train_dataset = dict is refused: give one of its splits, such as train_dataset["tr',
        ),
        ("data.jsonl", "train_dataset = str is refused: give a list of dicts, or a Dataset of the library"),
        (7, "train_dataset = int is refused: give a list of dicts"),
        (
            iter(CHATS),
            "train_dataset = list_iterator is refused: prompts are drawn by their number, and it has",
        ),
        (
            {1, 2},
            "train_dataset = set is refused: prompts are drawn by their number, and it has none; give list(",
        ),
    ],
)
def test_promise_2_what_is_no_sequence_of_rows_is_refused(
    tokenizer: TextTokenizer, rows: Any, says: str
) -> None:
    assert refusal(tokenizer, rows).startswith(says)


def test_promise_2_of_a_data_set_of_the_library(tokenizer: TextTokenizer) -> None:
    import datasets

    rows = [{**row, "image": None, "images": []} for row in CHATS]
    given = datasets.Dataset.from_list(rows)
    prompts = Prompts("train_dataset", given, tokenizer)
    assert prompts.digest == Prompts("train_dataset", rows, tokenizer).digest
    assert dict(prompts.row(3)) == given[3] and prompts.columns == ("answer", "image", "images")
    assert list(prompts.page(0, 20)) == list(Prompts("train_dataset", rows, tokenizer).page(0, 20))
    streams = given.to_iterable_dataset()
    assert refusal(tokenizer, streams).endswith(
        "or where it streams for ever its first rows, list(train_dataset.take(1000))"
    )
    assert "give one of its splits" in refusal(tokenizer, datasets.DatasetDict(train=given))
    assert "has no column 'prompt', but answer" in refusal(tokenizer, given.remove_columns("prompt"))
    asked = given.rename_column("answer", "prompts")
    assert "has a column 'prompts', by which" in refusal(tokenizer, asked)
    shown_images = datasets.Dataset.from_list([{"prompt": "x", "images": ["a.png"]}])
    assert "train_dataset[0]['images'] is refused" in refusal(tokenizer, shown_images)


def test_promise_2_a_data_set_that_makes_its_rows_is_read_by_its_rows(tokenizer: TextTokenizer) -> None:
    import datasets

    given = datasets.Dataset.from_dict({"question": ["a", "b"]})
    given.set_transform(lambda batch: {"prompt": [f"Q: {one}" for one in batch["question"]]})
    assert "has no column 'prompt', but question" in refusal(tokenizer, given)
    named = datasets.Dataset.from_dict({"prompt": ["a", "b"], "n": [1, 2]})
    named.set_transform(
        lambda batch: {"prompt": [f"{p}{n}" for p, n in zip(batch["prompt"], batch["n"], strict=True)]}
    )
    found = Prompts("train_dataset", named, tokenizer)
    assert [tokenizer.decode(one.tokens.token_ids) for one in found.page(0, 2)] == ["a1", "b2"]


def test_promise_2_any_sized_sequence_will_do_and_its_own_errors_are_said(tokenizer: TextTokenizer) -> None:
    class Rows:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"prompt": ["a", "b"][index]}

    assert refusal(tokenizer, Rows()).startswith("train_dataset[2] cannot be read (IndexError(")


def test_promise_2_rows_are_read_by_one_thread_at_a_time_and_none_is_kept(tokenizer: TextTokenizer) -> None:
    inside, most = [0], [0]

    class Rows(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.0005)
            inside[0] -= 1
            return super().__getitem__(index)

    prompts = Prompts("train_dataset", Rows([dict(row) for row in CHATS]), tokenizer)
    threads = [threading.Thread(target=lambda: list(prompts.page(0, 20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert prompts.row(3) is prompts.row(3)


def test_promise_2_100_000_rows_are_looked_at_within_seconds(tokenizer: TextTokenizer) -> None:
    system = {"role": "system", "content": "Answer with a number."}
    rows = [{"prompt": [system, {"role": "user", "content": f"What is {n} + {n}?"}]} for n in range(100_000)]
    began = time.process_time()
    assert len(Prompts("train_dataset", rows, tokenizer)) == 100_000
    assert time.process_time() - began < AFFORDABLE_SECONDS


def test_promise_3_keys_and_digests(tokenizer: TextTokenizer) -> None:
    keys = [found.key for found in Prompts("t", [*CHATS, *CHATS], tokenizer).page(0, 40)]
    assert keys[:20] == keys[20:] and len(set(keys)) == 20 and {len(key) for key in keys} == {32}
    assert one(tokenizer, "x").key != one(tokenizer, [{"role": "user", "content": "x"}]).key

    def digest(*rows: Any, settings: str = "") -> str:
        return Prompts("t", list(rows), tokenizer, settings).digest

    assert digest(*CHATS) == Prompts("other", CHATS, tokenizer).digest
    others = {
        digest(*CHATS),
        digest(*CHATS[:-1]),
        digest(*reversed(CHATS)),
        digest(*CHATS, settings='{"x": 1}'),
        digest({"prompt": "ab"}, {"prompt": "c"}),
        digest({"prompt": "a"}, {"prompt": "bc"}),
    }
    assert len(others) == 6
    assert digest({"prompt": "a", "answer": 1}) == digest({"prompt": "a", "answer": object()})


def test_settings_of_the_chat_template_travel_with_each(tokenizer: TextTokenizer) -> None:
    prompts = Prompts("t", CHATS, tokenizer, '{"enable_thinking": false}')
    assert {found.template_settings for found in prompts.page(0, 20)} == {'{"enable_thinking": false}'}
    assert prompts.group(0, [[1]]).settings == {"enable_thinking": False}
    with pytest.raises(ConfigError, match=r"^chat_template_kwargs = .* rendering sets it itself"):
        Prompts("t", CHATS, tokenizer, '{"tools": []}')


def test_promise_4_a_page_fits_into_a_message(tokenizer: TextTokenizer) -> None:
    """Also of tokens that have three bytes each, and it goes on where it ended."""
    large = [{"prompt": "x" * (MAX_PROMPT_BYTES - 32), "answer": "y" * 9000} for _ in range(3)]
    for rows in (large, [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in large]):
        prompts = Prompts("t", rows, tokenizer)
        seen = 0
        while seen < len(rows):
            page = list(prompts.page(seen, 100))
            assert page and GetPromptsResponse(prompts=page).ByteSize() < MAX_MESSAGE_BYTES
            seen += len(page)
        assert seen == len(rows)
    assert (
        module.MAX_PROMPT_BYTES * 3 + module.MAX_PAGE_BYTES + 2 * 8192 + task_data.MAX_BYTES
        < MAX_MESSAGE_BYTES
    )


def test_pages_end_with_the_data_set(tokenizer: TextTokenizer) -> None:
    prompts = Prompts("t", CHATS, tokenizer)
    assert len(list(prompts.page(0, 4096))) == 20
    assert list(prompts.page(18, 5)) == list(prompts.page(0, 20))[18:]
    assert list(prompts.page(20, 1)) == list(prompts.page(2**64 - 1, 4096)) == []


def test_what_a_template_is_not_given_is_said_once(
    tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "x", "weight": n, "id": None}]} for n in range(3)]
    with caplog.at_level(logging.WARNING, "quartet.rewards"):
        Prompts("train_dataset", rows, tokenizer)
    assert [record.getMessage() for record in caplog.records] == [
        "train_dataset: 'weight' of a message is without effect: no chat template is given it"
    ]


def test_shown_is_what_is_json(tokenizer: TextTokenizer) -> None:
    """shown.py 1."""
    columns = {"answer": "4", "n": 1.5, "deep": {"a": [None, True]}, "when": date(2026, 1, 1), "o": object()}
    found = one(tokenizer, USER, **columns, numbers={1: 2}, text="\ud800", gone=None, nan=math.nan)
    assert json.loads(found.data_json) == {
        "answer": "4",
        "n": 1.5,
        "deep": {"a": [None, True]},
        "text": "\ud800",
        "nan": None,
    }


def test_shown_is_a_prompt_of_text_which_travels_as_tokens(tokenizer: TextTokenizer) -> None:
    assert json.loads(one(tokenizer, "a text", n=1).data_json) == {"prompt": "a text", "n": 1}


def test_shown_is_bounded_without_a_look_at_all_of_it() -> None:
    """shown.py 2."""

    class Endless(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("it is not gone through")

        def __len__(self) -> int:
            return 10**12

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    told = shown.told(
        {"long": "x" * 5000, "list": Endless([1]), "wide": {str(n): n for n in range(9999)}, "n": 1}
    )
    assert json.loads(told) == {"long": None, "list": None, "wide": None, "n": 1}
    assert json.loads(shown.told({"deep": deep, "n": 1})) == {"deep": None, "n": 1}


def test_what_functions_change_is_not_the_scripts_own(tokenizer: TextTokenizer) -> None:
    rows = [{"prompt": [{"role": "user", "content": "q"}], "tests": [1, 2], "of": {"a": [3]}}]
    prompts = Prompts("train_dataset", rows, tokenizer)
    group = prompts.group(0, [[1], [1]])
    group.columns["tests"][0].pop()
    group.columns["of"][0]["a"].clear()
    group.prompts[0].clear()
    assert (group.columns["tests"][1], group.columns["of"][1]) == ([1, 2], {"a": [3]})
    assert rows == [{"prompt": [{"role": "user", "content": "q"}], "tests": [1, 2], "of": {"a": [3]}}]


def test_promise_5_with_tools_prompts_are_messages_that_show_them(tokenizer: TextTokenizer) -> None:
    shown = [common_pb2.ToolDefinition(name="f", parameters_json="{}")]
    with pytest.raises(ConfigError) as refused:
        Prompts("t", [*CHATS[:1], {"prompt": "text"}], tokenizer, tools=shown)
    assert str(refused.value).startswith(
        't[1]["prompt"] is text, and tools are shown by a chat template; give'
    )
    prompts = Prompts("t", CHATS, tokenizer, tools=shown)
    assert all(list(one.tools) == shown for one in prompts.page(0, 20))
    answer = common_pb2.Message(role="assistant", content="read")
    group = prompts.group(0, [[1], [2]], [[answer], [answer, answer]])
    said = {"role": "assistant", "content": "read"}
    assert group.completions == [[said], [said, said]]
    assert Prompts("t", CHATS, tokenizer).group(0, [[1]], [[answer]]).completions != [[said]]
