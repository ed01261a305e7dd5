"""The chat template as text: whole conversations, and what follows a turn that was sampled.

1. `following` gives the text between a sampled turn's last token and the next turn's opening, as the
   template itself would write it. It depends on the tail alone: the earlier tokens need never be rendered.
2. Where the template writes the end of an earlier turn, or what follows it, in a way that cannot be told
   apart from that turn's own text, or puts a part of the tail before it, or leaves it out, there is no such
   text: `Unextendable`.
3. `rewrites_earlier_turns` says whether the template would have dropped or changed an earlier turn once the
   conversation went on, as Qwen3's does with thinking. Exact tokens are kept all the same.
4. All of it holds for the settings that the template is given: with others (`given`) it is another template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import jinja2
from quartet import template_settings
from quartet.calls_as_text import TemplateRefused, rendered
from quartet.errors import QuartetError, refused
from quartet.left_out import NAME, TOOL, Message, Tools
from transformers import PreTrainedTokenizerBase

from quartet_inference.chat.shown import CALL_ID, Shown, called

#: Stands for the sampled turn in a rendering whose only purpose is the text that follows such a turn.
SAMPLED_TURN = "QUARTETSAMPLEDTURN"
#: Stands for the messages behind it, likewise, with the number of each.
LATER = "QUARTETLATER"
#: Runs that a replica serves at once choose so many different settings; what was used longest ago goes first.
MAX_GIVEN = 64
#: Tails of so many different forms are known; what was used longest ago goes first.
MAX_TAILS = 256
#: To whoever sends messages where there is no template.
NO_TEMPLATE = (
    "the model has no chat template: send token ids, or texts to /v1/completions; or give one, as "
    "chat_template.jinja of the model's folder or as chat.template_file, and start the service again"
)
_BEFORE: list[Message] = [
    {"role": "user", "content": "."},
    {"role": "assistant", "content": SAMPLED_TURN},
]


class Unextendable(Exception):
    """The tail cannot be appended to exact tokens; the conversation has to be rendered as a whole."""


class Template:
    """The template of a tokenizer, with the settings it is always given."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any], ends: Sequence[str] = ()
    ) -> None:
        """`ends`: the texts of the tokens that end a turn."""
        self._tokenizer = tokenizer
        self._settings = dict(settings)
        self._ends = tuple(ends)
        self.text = _source(tokenizer.chat_template)
        self.shown = Shown(self.render)
        self._given = lru_cache(MAX_GIVEN)(self._with)
        self._left_out = lru_cache(MAX_TAILS)(self._left_out_of)

    @property
    def is_there(self) -> bool:
        """Whether there is one: a base model has none. A tokenizer of its own kind (Mistral's) needs none."""
        own = type(self._tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        return own or bool(self.text)

    def given(self, settings: str) -> Template:
        """The same with a request's settings, as they travel, over its own. Errors: INVALID_REQUEST."""
        return self._given(settings) if settings else self

    def _with(self, settings: str) -> Template:
        try:
            chosen = template_settings.read(settings)
        except ValueError as error:
            raise refused("template_settings", settings, str(error)) from error
        return Template(self._tokenizer, {**self._settings, **chosen}, self._ends)

    def render(self, messages: Sequence[Message], tools: Tools, opened: bool = True) -> str:
        """A conversation, by default opened for the assistant. Errors: INVALID_REQUEST."""
        try:
            return rendered(partial(self._rendered, tools, opened), messages, jinja2.TemplateError)
        except TemplateRefused as error:
            # What it was given besides may be what it stumbles over.
            given = f", or {', '.join(sorted(self._settings))} of template_settings" if self._settings else ""
            raise QuartetError(
                "INVALID_REQUEST",
                f"messages{given}: the chat template refuses them: {error}; send what the template knows",
                field="messages",
                value="",
                remedy="send what the template knows",
            ) from error

    def _rendered(self, tools: Tools, opened: bool, messages: Sequence[Message]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=opened,
                tokenize=False,
                **self._settings,
            )
        )

    def following(self, tail: Sequence[Message], tools: Tools) -> str:
        """What closes a sampled turn, the tail, and the next turn's opening. Raises Unextendable."""
        left_out = self._left_out(tuple(message["role"] for message in tail), bool(tools))
        if left_out:
            raise Unextendable(
                f"the template leaves a later {left_out} message out, or puts it before the turns that were "
                "sampled"
            )
        return self._following(tail, tools)

    def _following(self, tail: Sequence[Message], tools: Tools) -> str:
        if tail[0]["role"] == "tool":
            after_calls = self._after_calls(tail, tools)
            if after_calls is not None:
                return after_calls
        return self._after_text(tail, tools)

    def _after_text(self, tail: Sequence[Message], tools: Tools) -> str:
        try:
            return _behind(self.render([*_BEFORE, *tail], tools), 1)
        except QuartetError as error:
            raise Unextendable(error.message) from error

    def _left_out_of(self, roles: tuple[str, ...], with_tools: bool) -> str:
        """The role of a message that is not in what follows, of a tail of these; empty where all are."""
        tail: list[Message] = [
            {"role": role, "content": f"{LATER}{number}."}
            # Results are found by their calls' ids, of nine letters and digits as CALL_ID is.
            | ({"name": "tool", "tool_call_id": f"q{number:08d}"} if role == "tool" else {})
            for number, role in enumerate(roles)
        ]
        try:
            text = self._following(tail, [TOOL] if with_tools else [])
        except Unextendable:  # so is the tail that was asked for, with its own reason
            return ""
        return next((one["role"] for one in tail if one["content"] not in text), "")

    def _after_calls(self, tail: Sequence[Message], tools: Tools) -> str | None:
        """The same behind a turn that called tools; None where the template renders no such turn.

        The text behind the calls' own end is what the rendering with the tail has more than the one without.
        What ends such a turn is what ends any other, or a token that ends turns.
        """
        calls = []
        for message in tail:
            if message["role"] != "tool":
                break
            call_id = message.get("tool_call_id") or CALL_ID
            calls.append(called(message.get("name") or "tool", {"of": SAMPLED_TURN}, call_id))
        caller = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            alone = self.render([_BEFORE[0], caller], tools, opened=False)
            joined = self.render([_BEFORE[0], caller, *tail], tools)
            marks = alone.count(SAMPLED_TURN)
            end, more = _behind(alone, marks), _behind(joined, marks)
            closing = _behind(self.render(_BEFORE, tools, opened=False), 1)
        except (QuartetError, Unextendable):
            return None
        if not end.endswith(closing):
            ending = next((text for text in self._ends if text and end.endswith(text)), None)
            if ending is None:
                if joined.endswith(after_text := self._after_text(tail, tools)):
                    return after_text
                raise Unextendable("the template ends a turn with calls by what is no end token of the model")
            closing = ending
        if not more.startswith(end):
            raise Unextendable("the template ends a turn with calls differently once their answers follow")
        return closing + more[len(end) :]

    def rewrites_earlier_turns(self, thinks: bool) -> bool:
        """Whether the template drops or changes a prompt, or what was thought, when the talk goes on."""
        question, more = ({"role": "user", "content": text} for text in ("question", "more"))
        turn = {"role": "assistant", "content": "answer"} | (
            {"reasoning_content": "thought"} if thinks else {}
        )
        for tools in ((), (TOOL,)):
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
        answer = {"role": "tool", "content": "1", "tool_call_id": CALL_ID, "name": NAME}
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
