"""The chat template as text: whole conversations, and what follows a turn that was sampled.

1. `following` gives the text between a sampled turn's last token and the next turn's opening, as the
   template itself would write it. It depends on the tail alone: the earlier tokens need never be rendered.
2. Where the template writes the end of an earlier turn, or what follows it, in a way that cannot be told
   apart from that turn's own text, or puts a part of the tail before it, there is no such text:
   `Unextendable`.
3. `rewrites_earlier_turns` says whether the template would have dropped or changed an earlier turn once the
   conversation went on, as Qwen3's does with thinking. Exact tokens are kept all the same.
4. All of it holds for the settings that the template is given: with others (`given`) it is another template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from quartet import template_settings
from quartet.errors import QuartetError, refused
from transformers import PreTrainedTokenizerBase

#: Stands for the sampled turn in a rendering whose only purpose is the text that follows such a turn.
SAMPLED_TURN = "QUARTETSAMPLEDTURN"
#: Stands for a system message behind it, likewise.
LATER_SYSTEM = "QUARTETLATERSYSTEM"
#: What a tool message answers where it does not say it: nine letters, as Mistral's templates demand.
CALL_ID = "quartetid"
#: Runs that a replica serves at once choose so many different settings; what was used longest ago goes first.
MAX_GIVEN = 64

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


class Unextendable(Exception):
    """The tail cannot be appended to exact tokens; the conversation has to be rendered as a whole."""


class Template:
    """The template of a tokenizer, with the settings it is always given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._settings = dict(settings)
        self.text = _source(tokenizer.chat_template)
        self._given = lru_cache(MAX_GIVEN)(self._with)

    def given(self, settings: str) -> Template:
        """The same with a request's settings, as they travel, over its own. Errors: INVALID_REQUEST."""
        return self._given(settings) if settings else self

    def _with(self, settings: str) -> Template:
        try:
            chosen = template_settings.read(settings)
        except ValueError as error:
            raise refused("template_settings", settings, str(error)) from error
        return Template(self._tokenizer, {**self._settings, **chosen})

    def render(self, messages: Sequence[Message], tools: Tools, opened: bool = True) -> str:
        """A conversation, by default opened for the assistant. Errors: INVALID_REQUEST."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=opened,
                    tokenize=False,
                    **self._settings,
                )
            )
        except (
            jinja2.TemplateError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            # What it was given besides may be what it stumbles over.
            given = f", or {', '.join(sorted(self._settings))} of template_settings" if self._settings else ""
            raise QuartetError(
                "INVALID_REQUEST",
                f"messages{given}: the chat template refuses them: {error}; send what the template knows",
                field="messages",
                value="",
                remedy="send what the template knows",
            ) from error

    def following(self, tail: Sequence[Message], tools: Tools) -> str:
        """What closes a sampled turn, the tail, and the next turn's opening. Raises Unextendable."""
        before: list[Message] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": SAMPLED_TURN},
        ]
        if any(message["role"] == "system" for message in tail):
            self._check_stays(before, tail, tools)
        if tail[0]["role"] == "tool":
            called = self._after_calls(before, tail, tools)
            if called is not None:
                return called
        try:
            return _behind(self.render([*before, *tail], tools), 1)
        except QuartetError as error:
            raise Unextendable(error.message) from error

    def _check_stays(self, before: Sequence[Message], tail: Sequence[Message], tools: Tools) -> None:
        """Whether the template leaves the tail's system messages where they stand. Raises Unextendable."""
        marked = [{**one, "content": LATER_SYSTEM} if one["role"] == "system" else one for one in tail]
        try:
            joined = self.render([*before, *marked], tools)
        except QuartetError as error:
            raise Unextendable(error.message) from error
        if LATER_SYSTEM in joined.partition(SAMPLED_TURN)[0]:
            raise Unextendable("the template puts a later system message before the turns that were sampled")

    def _after_calls(self, before: list[Message], tail: Sequence[Message], tools: Tools) -> str | None:
        """The same behind a turn that called tools; None where the template renders no such turn.

        The text behind the calls' own end is what the rendering with the tail has more than the one without.
        """
        calls = []
        for message in tail:
            if message["role"] != "tool":
                break
            function = {"name": message.get("name") or "tool", "arguments": {"of": SAMPLED_TURN}}
            calls.append(
                {"id": message.get("tool_call_id") or CALL_ID, "type": "function", "function": function}
            )
        caller = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            alone = self.render([before[0], caller], tools, opened=False)
            joined = self.render([before[0], caller, *tail], tools)
            marks = alone.count(SAMPLED_TURN)
            end, more = _behind(alone, marks), _behind(joined, marks)
            closing = _behind(self.render(before, tools, opened=False), 1)
        except (QuartetError, Unextendable):
            return None
        if not end.endswith(closing):
            return None
        if not more.startswith(end):
            raise Unextendable("the template ends a turn with calls differently once their answers follow")
        return closing + more[len(end) :]

    def rewrites_earlier_turns(self, thinks: bool) -> bool:
        """Whether the template drops or changes a prompt, or what was thought, when the talk goes on."""
        question, more = ({"role": "user", "content": text} for text in ("question", "more"))
        turn = {"role": "assistant", "content": "answer"} | (
            {"reasoning_content": "thought"} if thinks else {}
        )
        parameters = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}
        for tools in ((), (tool,)):
            try:
                prompt = self.render([question], tools)
                joined = self.render([question, turn, more], tools)
            except QuartetError:
                continue
            if not joined.startswith(prompt) or (thinks and "thought" not in joined):
                return True
        return False

    @cached_property
    def may_break(self) -> bool:
        """Whether some usual tail cannot be appended."""
        answer = {"role": "tool", "content": "1", "tool_call_id": CALL_ID, "name": "tool"}
        question = {"role": "user", "content": "more"}
        for tail in ([question], [answer], [answer, answer], [answer, question]):
            try:
                self.following(tail, ())
            except Unextendable:
                return True
        return False


def _behind(text: str, marks: int) -> str:
    """The text behind so many marks."""
    parts = text.split(SAMPLED_TURN, marks)
    if marks == 0 or len(parts) <= marks:
        raise Unextendable("the template renders no assistant turn")
    return parts[marks]


def _source(template: Any) -> str:
    """The text of a template, of all of them where there are several."""
    if isinstance(template, dict):
        return "\n".join(map(str, template.values()))
    return str(template or "")
