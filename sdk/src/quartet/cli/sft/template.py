"""The chat template of a model folder, given what transformers gives it when the model is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quartet.calls_as_text import TemplateRefused, rendered
from quartet.cli.sft.message import Message, Tool
from quartet.cli.sft.special_tokens import named_tokens
from quartet.config import ConfigError
from quartet.left_out import NAME, LeftOut, Part

#: Tokens that a template may put together with text, also where a folder names none.
USUAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
#: For so many different variables it is known what the template leaves out with them.
MAX_KNOWN: Final = 64


class _Generation(Extension):
    """`{% generation %}`, by which templates mark for TRL what an assistant says: here roles say what is
    learned, and what stands inside is printed."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """As transformers parses it: what is set inside stays inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_printed"), [], [], body).set_lineno(line)

    def _printed(self, caller: Callable[[], str]) -> str:
        return caller()


class Template:
    """A template, with the tokens that it may print."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateError."""

        def fail(why: str) -> None:
            raise jinja2.TemplateError(why)

        # As transformers renders them.
        engine = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        engine.filters["tojson"] = _json
        engine.globals["raise_exception"] = fail
        self._template = engine.from_string(source)
        self._tokens = tokens
        # Chats of one file have few variables, and are many.
        self._with = lru_cache(MAX_KNOWN)(self._left_out_with)
        #: Whether a tool that is listed can change what is rendered.
        self.reads_tools = "tools" in jinja2.meta.find_undeclared_variables(engine.parse(source))

    def left_out(
        self, messages: Sequence[Message], tools: Sequence[Tool], settings: Mapping[str, Any]
    ) -> Iterator[Part]:
        """What of a chat is not in the text, with these variables: the first of each kind."""
        return self._with(json.dumps(settings, sort_keys=True)).parts(messages, tools, False)

    def leaves_out_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], settings: Mapping[str, Any]
    ) -> bool:
        """Whether tools are listed of which the text names none: with other names it is the same."""
        if not (tools and self.reads_tools):
            return bool(tools)
        others = [
            {**tool, "function": {**tool["function"], "name": f"{NAME}_{number}"}}
            for number, tool in enumerate(tools)
        ]
        try:
            texts = [self.render(messages, listed, False, settings) for listed in (tools, others)]
        except ValueError:
            return False  # what a template refuses has a reason of its own
        return texts[0] == texts[1]

    def _left_out_with(self, settings: str) -> LeftOut:
        variables = json.loads(settings)

        def text(messages: Sequence[Message], tools: Sequence[Tool], opened: bool) -> str | None:
            try:
                return self.render(messages, tools, opened, variables)
            except ValueError:
                return None

        return LeftOut(text)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        prompt: bool,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation; the flag says whether to end with the generation prompt, the settings are variables
        of the template beside its tokens. Raises ValueError."""
        render = partial(self._rendered, tools, prompt, settings or {})
        try:
            return rendered(render, messages, jinja2.TemplateError)
        except TemplateRefused as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    def _rendered(
        self, tools: Sequence[Tool], prompt: bool, settings: Mapping[str, Any], messages: Sequence[Message]
    ) -> str:
        return self._template.render(
            messages=[_aliased(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=prompt,
            **{**self._tokens, **settings},
        )


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """With the options of transformers' filter, in their order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _aliased(message: Message) -> Message:
    """The template of gpt-oss knows reasoning by another name."""
    if "reasoning_content" not in message:
        return message
    return {"thinking": message["reasoning_content"], **message}


def template_of(folder: Path) -> Template:
    """The chat template of a model folder. Raises ConfigError."""
    beside = folder / "chat_template.jinja"
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        source = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the chat template of the model in {folder} cannot be read: {error}") from error
    if not isinstance(source, str):
        raise ConfigError(f"the model in {folder} has no chat template; add chat_template.jinja")
    try:
        return Template(source, dict.fromkeys(USUAL, "") | named_tokens(folder))
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of the model in {folder} cannot be read: {error}") from error
