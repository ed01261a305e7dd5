"""The tokenizer of a model folder with its chat template and its formats of thinking and tool calls.

1. `extend` never renders or encodes the given tokens again: its result begins with them, exactly.
2. Prompts are rendered with a request's settings (`template_settings`) over the service's own.
3. Special tokens are left out of texts, but for those that the formats are made of.
4. A folder's own Python is never run.
5. Everything here takes time that grows with the text: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from quartet.config import ConfigError
from quartet.errors import refused
from transformers import GenerationConfig, PreTrainedTokenizerBase

from quartet_inference.chat.enforced import (
    Thinking,
    Thought,
    TurnForm,
    answers_unsupported,
    calls_unsupported,
    check_calls,
    turn_grammar,
)
from quartet_inference.chat.formats import FORMATS, format_of
from quartet_inference.chat.harmony import ENDS as HARMONY_ENDS
from quartet_inference.chat.harmony import MARKS as HARMONY_MARKS
from quartet_inference.chat.harmony import NAME as HARMONY
from quartet_inference.chat.harmony import TURN_ENDS, HarmonyReader, opened_by, speaks_harmony
from quartet_inference.chat.lengths import check_length, longest
from quartet_inference.chat.reader import THINKING_MARKS, DeclaredReader, FormatReader, TurnReader
from quartet_inference.chat.schemas import schemas_of
from quartet_inference.chat.shown import HIDDEN_BESIDE, HIDDEN_TOOLS, check_messages
from quartet_inference.chat.spelling import spelling_of
from quartet_inference.chat.template import NO_TEMPLATE, Template
from quartet_inference.chat.tokenizer import decoder, encoder, lacking, load_tokenizer
from quartet_inference.chat.tool_format import ToolFormat
from quartet_inference.structure.following import Structures
from quartet_inference.structure.grammar import grammar, quoted
from quartet_inference.structure.vocabulary import bytes_of_text, ll_tokenizer, unfollowed

#: Tokens at a prompt's end among which an opened thinking or turn is looked for.
OPENING_TOKENS = 64
#: What can be chosen for a template.
PARSERS = (*FORMATS, HARMONY)

log = structlog.get_logger()


class Chat:
    """Everything between messages and tokens."""

    def __init__(
        self,
        folder: Path,
        tool_parser: str = "auto",
        template_file: Path | None = None,
        template_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the tokenizer. `tool_parser` is "auto", "none", or a name in PARSERS."""
        self._tokenizer = load_tokenizer(folder)
        self._lacking = lacking(self._tokenizer, folder)
        if template_file is not None:
            self._tokenizer.chat_template = template_file.read_text(encoding="utf-8")
        self.end_tokens = _end_tokens(self._tokenizer, folder)
        ends = [str(self._tokenizer.decode([token])) for token in sorted(self.end_tokens)]
        self.template = Template(self._tokenizer, template_settings or {}, ends)
        declared = getattr(self._tokenizer, "response_template", None)
        self._declared: dict[str, Any] | None = declared if tool_parser == "auto" else None
        #: The format in which a header says what is thinking, content, or a call.
        self._harmony = self._declared is None and _is_harmony(tool_parser, self.template)
        self._reads_calls = tool_parser != "none"
        other = self._declared is not None or self._harmony
        self._format = None if other else _choose(tool_parser, self.template)
        pairs = () if self._harmony else THINKING_MARKS
        self._thinking = next((pair for pair in pairs if pair[1] in self.template.text), None)
        self._is_chosen = tool_parser != "auto"
        self._warned = set[str]()
        self._spelling = None
        if self._format is not None:
            self._spelling = spelling_of(self._format.name, self.template.text)
        #: The grammars that completions have to follow, compiled for this tokenizer.
        self.structures = Structures(lambda: ll_tokenizer(self._tokenizer, self.end_tokens), self.end_tokens)
        self._special = {
            token: str(added.content)
            for token, added in self._tokenizer.added_tokens_decoder.items()
            if added.special
        }
        self._special_ids = {text: token for token, text in self._special.items()}
        #: Where any of several tokens ends what was said, the one that was sampled does.
        self._message_ends = self._tokens_of(HARMONY_ENDS) if self._harmony else frozenset()
        self._decode = decoder(self._tokenizer)
        self._encode = encoder(self._tokenizer)
        self._longest = longest(self._tokenizer)
        self._token_texts: dict[int, str] = {}  # at most the vocabulary
        self._bytes_of_text = bytes_of_text(self._tokenizer)
        self._wanted = self._tokens_of(HARMONY_MARKS if self._harmony else self._thinking or ())
        calls = self._format.special if self._format is not None else ()
        self._wanted_with_calls = self._wanted | self._tokens_of(calls)
        if not self._lacking and not self.template.is_there:
            log.warning("messages are refused", why=NO_TEMPLATE)
        thinks = self._harmony or self._thinking is not None
        self.rewrites_earlier_turns = self.template.rewrites_earlier_turns(thinks)
        log.info(
            "chat template",
            tool_parser=self.tool_parser,
            thinking=self._thinking[0] if self._thinking else "",
            rewrites_earlier_turns=self.rewrites_earlier_turns,
            may_break=self.template.may_break,
            shows_tools=self.template.shown.tools,
        )

    def _tokens_of(self, marks: Collection[str]) -> frozenset[int]:
        """The special tokens that these marks are made of."""
        special = self._special.items()
        return frozenset(token for token, text in special if any(text in mark for mark in marks))

    @property
    def tool_parser(self) -> str:
        """The format of tool calls in use."""
        if self._declared is not None:
            return "response_template"
        if self._harmony and self._reads_calls:
            return HARMONY
        return self._format.name if self._format is not None else "none"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        room: int | None = None,
        settings: str = "",
    ) -> list[int]:
        """The tokens of a conversation, opened for the assistant.

        Errors: INVALID_REQUEST, PROMPT_TOO_LONG.
        """
        self._check_template("messages")
        template = self.template.given(settings)
        text = template.render(messages, tools)
        if tools:
            self._check_read()
            if not template.shown.tools:
                self._tell_once(HIDDEN_TOOLS)
        if check_messages(template.shown, messages, tools):
            self._tell_once(HIDDEN_BESIDE)
        return self.encode(text, room=room)

    def extend(
        self,
        token_ids: Sequence[int],
        tail: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        room: int | None = None,
        settings: str = "",
    ) -> list[int]:
        """The given tokens, the close of the turn that they end with, the tail, the next turn's opening.

        Raises Unextendable. Errors: INVALID_REQUEST, PROMPT_TOO_LONG.
        """
        self._check_template("tokens.tail_messages")
        following = self.encode(self.template.given(settings).following(tail, tools), room=room)
        last = token_ids[-1]
        closes = last in self.end_tokens or last in self._special  # stop_token_ids' too
        if closes and following and (following[0] == last or {following[0], last} <= self._message_ends):
            following = following[1:]  # the turn was closed by the token that was sampled
        return [*token_ids, *following]

    def encode(self, text: str, add_special: bool = False, room: int | None = None) -> list[int]:
        """The tokens of a text; by default it has its special tokens written out.

        Errors: PROMPT_TOO_LONG, where it cannot be said in so many tokens; not every longer text is seen.
        INVALID_REQUEST.
        """
        self.check_texts("prompt")
        if room is not None and self._longest is not None:
            check_length(text, self._longest, room)
        return self._encode(text, add_special)

    def _check_template(self, field: str) -> None:
        """Whether messages can be rendered, for a field that has some. Errors: INVALID_REQUEST."""
        self.check_texts(field)
        if not self.template.is_there:
            raise refused(field, "given", NO_TEMPLATE)

    def check_texts(self, field: str) -> None:
        """Whether tokens can be made of texts, and texts of them, for a field. Errors: INVALID_REQUEST."""
        if self._lacking:
            raise refused(field, "given", self._lacking)

    def text(self, token_ids: Sequence[int], special: bool = False, keep: Collection[int] = ()) -> str:
        """The text of tokens; special ones are left out unless all or these are asked for."""
        if not special:
            token_ids = [t for t in token_ids if t not in self._special or t in keep]
        return self._decode(list(token_ids))

    def token_text(self, token: int, special: bool = True) -> str:
        """The text of one token, alone; of special ones all, or only those that calls are read of."""
        if not special and token in self._special and token not in self.kept_tokens:
            return ""
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self._decode([token])
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, alone: of its text, but that halves of characters stay halves."""
        return self._bytes_of_text(token, self.token_text(token))

    def reader(
        self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[TurnReader, frozenset[int]]:
        """A reader of what is sampled after a prompt, and the special tokens that it wants to see."""
        opening = prompt[-OPENING_TOKENS:]
        if self._declared is not None:
            prefix = self.text(opening, special=True)
            return DeclaredReader(self._declared, prefix, tools), self.kept_tokens
        if self._harmony:
            opened_message = opened_by(self.text(opening, special=True))
            return HarmonyReader(tools if self._reads_calls else (), opened_message), self.kept_tokens
        form = self._format if tools else None
        thought = self._thought(prompt).state
        opened, closed = thought is Thought.OPENED, thought is Thought.NONE
        reader = FormatReader(self._thinking, opened, form, schemas_of(tools), closed)
        return reader, self._told(tools)

    def untold(self, tools: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        """The special tokens that are no part of the text of a turn with these tools."""
        return frozenset(self._special.keys() - self._told(tools))

    def _told(self, tools: Sequence[Mapping[str, Any]]) -> frozenset[int]:
        return self._wanted_with_calls if tools and self._format is not None else self.kept_tokens

    def _check_read(self) -> None:
        """Whether calls can be read. Errors: INVALID_REQUEST."""
        if self.tool_parser == "none" and not self._is_chosen:
            raise refused(
                "tools",
                "given",
                "the model's chat template writes calls in a format that is not known here: set "
                f"chat.tool_parser where it is one of {', '.join(PARSERS)}, "
                "or give another chat.template_file",
            )

    def _tell_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text)

    @property
    def kept_tokens(self) -> frozenset[int]:
        """The special tokens that stay in the text of a turn without tools."""
        return self._wanted if self._declared is None else frozenset(self._special)

    def _thought(self, prompt: Sequence[int]) -> Thinking:
        """How what is sampled after a prompt thinks."""
        if self._thinking is None:
            return Thinking(Thought.NONE)
        begin, end = self._thinking
        text = self.text(prompt[-OPENING_TOKENS:], special=True).rstrip()
        if text.endswith(begin):
            return Thinking(Thought.OPENED, begin, end)
        return Thinking(Thought.NONE if text.endswith(end) else Thought.MAY, begin, end)

    @property
    def enforces_forms(self) -> bool:
        """Whether the tokenizer's tokens can follow a grammar at all."""
        return not unfollowed(self._tokenizer, self.end_tokens)

    @property
    def enforces_calls(self) -> bool:
        """Whether a grammar can say which calls a turn has."""
        return self._spelling is not None and self.enforces_forms

    @property
    def enforces_answers(self) -> bool:
        """Whether a grammar can say what a turn without tools is."""
        return self._declared is None and not self._harmony and self.enforces_forms

    def grammar(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]], form: TurnForm) -> str:
        """The grammar of what is sampled after a prompt; empty where anything may be.

        Errors: INVALID_REQUEST, NOT_IMPLEMENTED.
        """
        calls = form.calls
        check_calls(calls, tools)
        if form.answer is None and not (tools and calls.enforced):
            return ""
        if form.from_first_token and form.answer is not None and not tools:
            return grammar("start: @answer", {"answer": form.answer})
        if tools:
            if self._spelling is None:
                raise calls_unsupported(self.tool_parser)
        elif self._declared is not None or self._harmony:
            raise answers_unsupported(self.tool_parser)
        thinking = Thinking(Thought.NONE) if form.from_first_token else self._thought(prompt)
        return turn_grammar(form, tools, self._spelling if tools else None, thinking, self._mark)

    def _mark(self, text: str) -> str:
        """A mark of the formats in Lark's notation, whose special tokens no text spells."""
        token = next((one for one in self._special_ids if text.startswith(one)), None)
        if token is None:
            return quoted(text)
        rest = text.removeprefix(token)
        return f"<[{self._special_ids[token]}]> {quoted(rest)}" if rest else f"<[{self._special_ids[token]}]>"


def _end_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> frozenset[int]:
    ends: set[int] = set()
    if (folder / "generation_config.json").is_file():
        try:
            eos = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"model = {str(folder)!r} cannot be served: {error}") from error
        ends.update([eos] if isinstance(eos, int) else eos or [])
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    if speaks_harmony(str(tokenizer.chat_template)):
        # Some folders name one of them.
        ends.update(
            t for t, added in tokenizer.added_tokens_decoder.items() if str(added.content) in TURN_ENDS
        )
    return frozenset(ends)


def _is_harmony(name: str, template: Template) -> bool:
    """Whether turns are read as harmony's: what is chosen decides, else the template, calls or none."""
    return name == HARMONY or (name in ("auto", "none") and speaks_harmony(template.text))


def _choose(name: str, template: Template) -> ToolFormat | None:
    if name == "auto":
        found = format_of(template.text, template.shown.call)
        if found is None:
            log.warning(
                "the chat template writes calls of tools in a format that is not known here: a request with "
                "tools is refused; set chat.tool_parser if you know it",
                call=template.shown.call,
            )
        return found
    if name == "none":
        return None
    if name not in FORMATS:
        raise ConfigError(f"chat.tool_parser = {name!r} is refused: choose auto, none, {', '.join(PARSERS)}")
    return FORMATS[name]
