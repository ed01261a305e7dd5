"""Forms of answers that nothing enforces for a model: refused, or wishes; and pages of a browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pydantic
import pytest
from quartet_inference.openai.config import OpenAiConfig
from quartet_inference.openai.errors import OpenAiError
from quartet_inference.openai.wishes import Wishing, without_forms, without_wishes

from .openai_door import TOOL, opened, say
from .random_models import CHATML

STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "object"}}}
CALL = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
NAMES = {
    "tools[0].function.strict": {"tools": [STRICT]},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "response_format": {"tools": [TOOL], "response_format": SCHEMA},
    "guided_regex": {"tools": [TOOL], "extra_body": {"guided_regex": "a"}},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
}
#: How the answers of a tokenizer are read that says so itself: nothing makes a grammar of it.
READ_SO = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
PAGE = {"Origin": "https://page.example:8443"}


@pytest.fixture
def declaring(model_folder: Path, tmp_path: Path) -> Path:
    """The model, with a tokenizer that says how its answers are read."""
    folder = tmp_path / "declaring"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": READ_SO}))
    return folder


@pytest.fixture
def of_pieces(model_folder: Path, tmp_path: Path) -> Path:
    """The model, with a tokenizer whose texts do not say their bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "pieces"
    shutil.copytree(model_folder, folder)
    pieces = ["<unk>", "▁", *map(chr, range(33, 127))]
    pieces += [f"{a}{b}" for a in "aeiou" for b in "abcdefghijklmnopqrstuvwxyz0123456789"][
        : 256 - len(pieces)
    ]
    backend = Tokenizer(models.Unigram([(piece, -1.0 - len(piece)) for piece in pieces], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


FORMS = {
    "response_format": {"response_format": SCHEMA},
    "guided_regex": {"extra_body": {"guided_regex": "a"}},
}


async def test_where_no_grammar_can_be_followed_all_forms_are_wishes(of_pieces: Path) -> None:
    """wishes.py 1, 2: of chat, with tools and without, of responses and of completions."""
    async with opened(of_pieces) as door:
        for name, asked in {**NAMES, **FORMS}.items():
            with pytest.raises(openai.BadRequestError, match=r"openai\.best_effort") as refused:
                await door.chat(**asked)
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
        with pytest.raises(openai.BadRequestError, match=r"openai\.best_effort") as refused:
            await door.complete(extra_body={"guided_regex": "a"})
        assert refused.value.param == "guided_regex"
    async with opened(of_pieces, openai={"best_effort": True}) as door:
        raw, hi = door.plain.with_raw_response, [{"role": "user", "content": "hi"}]
        for name, asked in {**NAMES, **FORMS}.items():
            plain: Any = {"model": door.model, "messages": hi, "seed": 7, "max_tokens": 9}
            answers = [
                await raw.chat.completions.create(**plain, **more)
                for more in (asked, {"tools": [TOOL]} if "tools" in asked else {})
            ]
            texts = [answer.parse().choices[0].message.content for answer in answers]
            assert texts[0] == texts[1]
            assert [a.headers.get("X-Quartet-Not-Enforced") for a in answers] == [name, None]
        bare: Any = {"model": door.model, "prompt": "hi", "max_tokens": 9}
        told = await raw.completions.create(**bare, extra_body={"response_format": SCHEMA})
        assert told.headers["X-Quartet-Not-Enforced"] == "response_format" and told.parse().choices
        form: Any = {"format": {"type": "json_object"}}
        said = await raw.responses.create(model=door.model, input="hi", text=form, max_output_tokens=9)
        assert said.headers["X-Quartet-Not-Enforced"] == "text.format" and said.parse().output is not None


async def test_unless_configured_each_is_refused_by_name(declaring: Path) -> None:
    """wishes.py 1."""
    async with opened(declaring) as door:
        for name, asked in NAMES.items():
            with pytest.raises(openai.BadRequestError, match=r"openai\.best_effort") as refused:
                await door.chat(**asked)
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


async def test_a_wish_changes_nothing_and_is_named(declaring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wishes.py 2."""
    async with opened(declaring, openai={"best_effort": True}) as door:
        raw = door.plain.chat.completions.with_raw_response
        plain: Any = {"model": door.model, "messages": [{"role": "user", "content": "hi"}], "seed": 7}
        for name, asked in NAMES.items():
            without = {"tools": [TOOL]} if "tools" in asked else {}
            answers = [await raw.create(**plain, max_tokens=20, **more) for more in (asked, without)]
            texts = [answer.parse().choices[0].message.content for answer in answers]
            assert texts[0] == texts[1]
            assert [a.headers.get("X-Quartet-Not-Enforced") for a in answers] == [name, None]
        say(monkeypatch, door, CALL)
        everything = {"tools": [STRICT], "tool_choice": "required", "parallel_tool_calls": False}
        answer = await raw.create(**plain, **everything, response_format=SCHEMA, stream=True)
        assert answer.headers["X-Quartet-Not-Enforced"] == ", ".join(
            ["tools[0].function.strict", "tool_choice", "parallel_tool_calls", "response_format"]
        )
        calls = [call async for chunk in answer.parse() for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.function.name for call in calls] == ["add"]


async def test_other_values_are_checked_as_ever(model_folder: Path) -> None:
    """wishes.py 3."""
    async with opened(model_folder, openai={"best_effort": True}) as door:
        for name, value in (
            ("tool_choice", "any"),
            ("tool_choice", {"type": "music"}),
            ("response_format", {"type": "grammar"}),
            ("response_format", "json"),
            ("parallel_tool_calls", 0.5),
            ("tools", [{"type": "function", "function": {"name": "f", "strict": "very"}}]),
        ):
            body = {"model": door.model, "messages": [{"role": "user", "content": "x"}], name: value}
            status, error = await door.refusal(**body)
            assert status == 400 and error["param"].startswith(name), (value, error)


async def test_pages_of_allowed_origins_may_ask_and_read(model_folder: Path, tmp_path: Path) -> None:
    """browsers.py 1, 3."""
    key_file = tmp_path / "key"
    key_file.write_text("sesame\n")
    settings = {"allowed_origins": [PAGE["Origin"]], "api_key_file": key_file}
    ahead = {
        **PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    async with (
        opened(model_folder, openai=settings) as door,
        aiohttp.ClientSession(f"http://{door.address}") as page,
    ):
        async with page.options("/v1/chat/completions", headers=ahead) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]
            assert answer.headers["Access-Control-Allow-Headers"] == ahead["Access-Control-Request-Headers"]
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        key = {**PAGE, "Authorization": "Bearer sesame"}
        body = {"model": door.model, "prompt": "hi", "max_tokens": 2}
        for headers, stream, status in ((key, False, 200), (key, True, 200), (PAGE, False, 401)):
            sent = {**body, "stream": stream}
            async with page.post("/v1/completions", headers=headers, json=sent) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == PAGE["Origin"], "errors are read, too"
                assert answer.headers["Vary"] == "Origin"
        async with page.options("/v1/models", headers=PAGE) as answer:
            assert answer.status == 401, "no question of a browser"


@pytest.mark.parametrize("allowed", [[], ["https://other.example"]])
async def test_other_pages_are_told_nothing(model_folder: Path, allowed: list[str]) -> None:
    """browsers.py 2."""
    ahead = {**PAGE, "Access-Control-Request-Method": "POST"}
    async with (
        opened(model_folder, openai={"allowed_origins": allowed}) as door,
        aiohttp.ClientSession(f"http://{door.address}") as page,
    ):
        async with page.options("/v1/completions", headers=ahead) as answer:
            assert answer.status == 405 and "Access-Control-Allow-Origin" not in answer.headers
            assert (await answer.json())["error"]["code"] == "wrong_method"
        async with page.get("/v1/models", headers=PAGE) as answer:
            assert answer.status == 200 and "Access-Control-Allow-Origin" not in answer.headers


def test_an_origin_has_no_path() -> None:
    OpenAiConfig.model_validate({"allowed_origins": ["*", "http://localhost:5173"]})
    for wrong in ("localhost:5173", "http://localhost/", ""):
        with pytest.raises(pydantic.ValidationError, match="is no origin"):
            OpenAiConfig.model_validate({"allowed_origins": [wrong]})


async def test_where_answers_cannot_be_enforced_a_form_without_tools_is_a_wish() -> None:
    """wishes.py 1: a template that says how its answers are read has no grammar for them."""
    fields = {"messages": [], "response_format": {"type": "json_object"}, "guided_regex": "a"}
    unsaid = Wishing(True, calls_enforced=True, answers_enforced=False)
    assert without_wishes(fields, unsaid) == ({"messages": []}, ["response_format", "guided_regex"])
    assert without_wishes(fields, Wishing(True)) == (fields, [])
    with pytest.raises(OpenAiError, match="best_effort"):
        without_wishes(fields, Wishing(False, answers_enforced=False))


def test_tools_that_may_not_be_called_ask_nothing_of_calls() -> None:
    """wishes.py 1 and 4: a form is then that of an answer, and one call at most is none."""
    form: Any = {"response_format": {"type": "json_object"}}
    none: Any = {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False, **form}
    assert without_wishes(none, Wishing(calls_enforced=False)) == (none, [])
    assert without_wishes({**none, "tools": []}, Wishing(calls_enforced=False))[1] == []
    auto = {**none, "tool_choice": "auto"}
    left, named = without_wishes(auto, Wishing(True, calls_enforced=False))
    assert named == ["parallel_tool_calls", "response_format"]
    assert left == {"tools": [TOOL], "tool_choice": "auto"}
    with pytest.raises(
        OpenAiError, match="response_format is not supported here; leave it out, or send no tools"
    ):
        without_wishes({"tools": [TOOL], **form}, Wishing(calls_enforced=False))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": {"type": "custom", "name": "add"}},
        {"tools": [TOOL], "tool_choice": "add"},
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "text"}},
        {"response_format": "json"},
        {"tools": [{"type": "function", "function": {"name": "add", "strict": "yes"}}]},
        {"tools": "add", "parallel_tool_calls": True},
    ],
)
def test_what_is_no_known_form_is_left_to_be_checked(fields: Any) -> None:
    """wishes.py 3: a server that takes wishes still refuses what it does not know."""
    nothing = Wishing(True, calls_enforced=False, answers_enforced=False, forms_enforced=False)
    assert without_wishes(fields, nothing) == (fields, [])
    assert without_forms(fields, nothing) == (fields, [])
