"""How a model writes calls, as parts of a grammar in Lark's notation.

1. What a grammar of these derives is read back (`formats`) as exactly the calls that it was made for.
2. A mark that is a special token is named by its id: no text spells it. Any other is text.
3. A format has a spelling if what it reads as a call can be told from a text by its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quartet_inference.chat.formats import FORMATS, LFM2_END
from quartet_inference.chat.parameters import ArgumentRules, Mark, ParameterRules, Parameters
from quartet_inference.chat.pythonic import NAMES as PYTHON_NAMES
from quartet_inference.chat.pythonic import PythonRules
from quartet_inference.chat.texts import SPACES, escaped
from quartet_inference.structure.grammar import Part, quoted

#: A name that no mark of a format ends.
_PLAIN_NAME = r"[^\s<>:]+"


@dataclass(frozen=True)
class Spelling:
    """Of one format: `begin`, a call, `end`, and again; where they are a list, one `begin` for all calls."""

    begin: str  # the mark by which text turns into calls; empty: calls are all of an answer
    head: Callable[[str, Mark], str]  # from a call's beginning to its arguments, by the tool's name
    tail: str = ""  # from the arguments to the call's end
    opening: str = ""  # between `begin` and the first call
    end: str = ""  # a mark
    closing: str = ""  # between the last call and `end`
    between: str = ""  # calls
    listed: bool = False
    last: str = ""  # the mark behind each `tail`
    names: str = r"(.|\n)*"  # a regular expression of the tools' names that are read back
    #: Of one grammar, to which it adds rules and parts; None: the arguments are one JSON object.
    arguments: Callable[[Mark, list[str], dict[str, Part]], ArgumentRules] | None = None
    unopened: str = ""  # what `opening` ends with, where that begins a call in a text, too, without `begin`
    markers: tuple[str, ...] = ()  # by which the reader knows calls
    bare: str = ""  # with what an answer of calls alone begins, where the format reads one without `begin`

    def body(self, name: str, arguments: str, mark: Mark) -> str:
        """One call."""
        last = mark(self.last) if self.last else ""
        return f"{self.head(name, mark)} {arguments} {self.tail} {last}"

    def calls(self, bodies: Sequence[str], mark: Mark, single: bool, begun: str = "") -> str:
        """One call or more of these rules; `begun`: what follows the first `begin`, or `unopened`."""
        call = f"({' | '.join(bodies)})"
        if begun and begun == self.unopened:
            return call
        begin = mark(self.begin) if self.begin else ""
        end = f"{self.closing} {mark(self.end)}" if self.end else self.closing
        opening = f"{self.opening} {quoted(self.unopened)}" if self.unopened else self.opening
        if self.listed:
            more = "" if single else f"({self.between} {call})*"
            inner = f"{opening} {call} {more} {end}"
            return inner if begun else f"{begin} {inner}"
        one = f"{opening} {call} {end}"
        more = "" if single or begun else f"({self.between} {begin} {one})*"
        return f"{one} {more}" if begun else f"{begin} {one} {more}"

    def spoken(self, mark: Mark, text: str) -> str:
        """Of a text, a terminal, what has no beginning of a call but those that a grammar sees."""
        seen = tuple(one for one in (self.begin, self.unopened) if one and mark(one).startswith('"'))
        unseen = {one for one in (*self.markers, self.begin) if one and not one.startswith(seen)}
        if self.bare:
            text += f" & ~/{SPACES}{escaped(self.bare)}(.|\\n)*/"
        return text + "".join(f" & ~/(.|\\n)*{escaped(one)}(.|\\n)*/" for one in sorted(unseen))


def _object(key: str) -> Callable[[str, Mark], str]:
    """{"name": ..., key: ...} up to the arguments."""

    def head(name: str, mark: Mark) -> str:
        words = ['"{"', '"\\"name\\""', '":"', quoted(quoted(name)), '","', quoted(quoted(key)), '":"']
        return " SPACE? ".join(words) + " SPACE?"

    return head


def _named(name: str, mark: Mark) -> str:
    return f"{quoted(name)} {mark('[ARGS]')} SPACE?"


_TAGGED = Spelling(
    "<tool_call>",
    _object("arguments"),
    'SPACE? "}"',
    opening="SPACE?",
    end="</tool_call>",
    closing="SPACE?",
    between="SPACE?",
)
_LISTED = Spelling(
    "[TOOL_CALLS]",
    _object("arguments"),
    'SPACE? "}"',
    opening='SPACE? "[" SPACE?',
    closing='SPACE? "]"',
    between='SPACE? "," SPACE?',
    listed=True,
)

_CODER = replace(
    _TAGGED,
    head=lambda name, mark: quoted(f"{name}>"),
    tail='SPACE? "</function>"',
    names=_PLAIN_NAME,
    unopened="<function=",
    arguments=partial(
        ParameterRules,
        Parameters(
            lambda name, mark: f'SPACE? "<parameter=" {name} ">\\n"', "</parameter>", r"[^>\n]+", gap="\n"
        ),
    ),
)


def _glm_parameter(name: str, mark: Mark) -> str:
    return f"SPACE? {mark('<arg_key>')} {name} {mark('</arg_key>')} SPACE? {mark('<arg_value>')}"


_GLM = replace(
    _TAGGED,
    head=lambda name, mark: quoted(name),
    tail="",
    names=_PLAIN_NAME,
    arguments=partial(ParameterRules, Parameters(_glm_parameter, "</arg_value>", "[^<]+")),
)


def _deepseek_name(name: str, mark: Mark) -> str:
    return f"{mark('<｜tool▁call▁begin｜>')} {quoted(name)} {mark('<｜tool▁sep｜>')} SPACE?"


def _deepseek_function(name: str, mark: Mark) -> str:
    """Of V3 and R1."""
    begin, between = mark("<｜tool▁call▁begin｜>"), mark("<｜tool▁sep｜>")
    return f'{begin} "function" {between} {quoted(name)} "\\n```json\\n" SPACE?'


_DEEPSEEK = Spelling(
    "<｜tool▁calls▁begin｜>",
    _deepseek_name,
    "SPACE?",
    opening="SPACE?",
    end="<｜tool▁calls▁end｜>",
    closing="SPACE?",
    between="SPACE?",
    listed=True,
    last="<｜tool▁call▁end｜>",
    names=_PLAIN_NAME,
)


def _kimi_name(name: str, mark: Mark) -> str:
    """With the number of the call in its conversation, which the reader leaves out."""
    begin, arguments = mark("<|tool_call_begin|>"), mark("<|tool_call_argument_begin|>")
    return f"{begin} SPACE? {quoted(f'functions.{name}:')} /[0-9]{{1,4}}/ SPACE? {arguments} SPACE?"


_KIMI = replace(
    _DEEPSEEK,
    begin="<|tool_calls_section_begin|>",
    head=_kimi_name,
    end="<|tool_calls_section_end|>",
    last="<|tool_call_end|>",
)


_PYTHONIC = Spelling(
    "",
    lambda name, mark: quoted(f"{name}("),
    '")"',
    opening='"["',
    closing='"]"',
    between="/, ?/",
    listed=True,
    names=PYTHON_NAMES,
    arguments=PythonRules,
)
#: Of Olmo: a call on each line, which an indent would end.
_LINES = replace(
    _PYTHONIC, begin="<function_calls>", opening="SPACE?", closing="SPACE?", end="</function_calls>",
    between=quoted("\n"),
)  # fmt: skip
_LFM2 = replace(
    _PYTHONIC, begin="<|tool_call_start|>", end=LFM2_END, arguments=partial(PythonRules, ends=(LFM2_END,))
)


def spelling_of(name: str, template: str) -> Spelling | None:
    """Of a format, as a chat template writes it; None where it has none."""
    form, spelling = FORMATS[name], _of_template(name, template)
    return None if spelling is None else replace(spelling, markers=form.markers, bare=form.bare)


def _of_template(name: str, template: str) -> Spelling | None:
    if name == "llama3_json":
        return Spelling("", _object("parameters"), 'SPACE? "}"', between='SPACE? ";" SPACE?', listed=True)
    if name == "mistral":
        named = Spelling("[TOOL_CALLS]", _named, names=r"[\w.\-]+")
        return named if "[ARGS]" in template else _LISTED
    if name == "json_list":
        begin = "functools" if "functools[" in template else "<|tool_call|>"
        end = "<|/tool_call|>" if "<|/tool_call|>" in template else ""
        return replace(_LISTED, begin=begin, end=end)
    if name == "deepseek_v3" and "```json" in template:
        return replace(_DEEPSEEK, head=_deepseek_function, tail='SPACE? "```" SPACE?')
    if name == "pythonic":
        return _LINES if "<function_calls>" in template else _PYTHONIC
    return {"hermes": _TAGGED, "qwen3_coder": _CODER, "glm45": _GLM, "deepseek_v3": _DEEPSEEK,
            "kimi_k2": _KIMI, "lfm2": _LFM2}.get(name)  # fmt: skip
