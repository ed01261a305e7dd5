"""The form of an answer and the choice of tools, as clients ask for them, in the words of the contract.

1. A form is asked for once: as OpenAI's `response_format`, as vLLM's `structured_outputs`, or by the older
   names of that. All are enforced, `strict` or not.
2. Of chat the form holds behind any thinking; of completions from the first token on.
3. What is refused of a form is refused by the name that the client gave it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
from quartet.errors import QuartetError
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from quartet_inference.openai.errors import malformed
from quartet_inference.openai.turns import Strict
from quartet_inference.structure.grammar import of_choices

_Texts = Annotated[list[Annotated[str, pydantic.Field(min_length=1)]], pydantic.Field(min_length=1)]
_Schema = str | dict[str, Any]


class _SchemaBody(Strict):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = pydantic.Field(default=None, alias="schema")
    strict: bool | None = None


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _SchemaBody | None = None


class _StructuredOutputs(Strict):
    json_: _Schema | None = pydantic.Field(default=None, alias="json")
    regex: str | None = None
    choice: _Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Forms(Strict):
    """The fields of a request that say its form."""

    response_format: _Format | None = None
    structured_outputs: _StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: _Texts | None = None
    guided_grammar: str | None = None

    def form(self) -> tuple[str, common_pb2.Structure] | None:
        """What the client calls it, and the form; None: any. Raises OpenAiError."""
        found = [(name, form) for name, form in self._forms() if form is not None]
        if len(found) > 1:
            raise malformed(found[1][0], f"send one form; {found[0][0]} is another")
        return found[0] if found else None

    def _forms(self) -> list[tuple[str, common_pb2.Structure | None]]:
        form, outputs = self.response_format, self.structured_outputs
        found: list[tuple[str, common_pb2.Structure | None]] = []
        if form is not None:
            found.append(("response_format", _of_format(form)))
        if outputs is not None:
            name = "structured_outputs"
            given: list[tuple[str, common_pb2.Structure | None]] = [
                (f"{name}.json", _of_schema(outputs.json_)),
                (f"{name}.regex", _of(regex=outputs.regex)),
                (f"{name}.choice", _of_choice(outputs.choice)),
                (f"{name}.grammar", _of(grammar=outputs.grammar)),
                (f"{name}.json_object", _of(json_object=outputs.json_object or None)),
            ]
            if not any(one for _, one in given):
                raise malformed(name, "send one of json, regex, choice, grammar, json_object")
            found += given
        found += [
            ("guided_json", _of_schema(self.guided_json)),
            ("guided_regex", _of(regex=self.guided_regex)),
            ("guided_choice", _of_choice(self.guided_choice)),
            ("guided_grammar", _of(grammar=self.guided_grammar)),
        ]
        return found


def _of(**form: Any) -> common_pb2.Structure | None:
    return None if None in form.values() else common_pb2.Structure(**form)


def _of_schema(schema: _Schema | None) -> common_pb2.Structure | None:
    return _of(json_schema=json.dumps(schema) if isinstance(schema, dict) else schema)


def _of_choice(texts: list[str] | None) -> common_pb2.Structure | None:
    return _of(grammar=None if texts is None else of_choices(texts))


def _of_format(form: _Format) -> common_pb2.Structure | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return common_pb2.Structure(json_object=True)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise malformed("response_format.json_schema.schema", "send the schema")
    return _of_schema(form.json_schema.schema_)


class _Name(Strict):
    name: str


class _AllowedTool(Strict):
    type: Literal["function"]
    function: _Name


class _Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_AllowedTool], pydantic.Field(min_length=1)]


class Chosen(Strict):
    """A choice of some tools."""

    type: Literal["function", "allowed_tools"]
    function: _Name | None = None
    allowed_tools: _Allowed | None = None


def tool_choice(chosen: str | Chosen, single: bool, offered: list[str]) -> pb.ToolChoice | None:
    """The choice of the contract; None: as the model likes. Raises OpenAiError."""
    choice = pb.ToolChoice(single=single, required=chosen == "required")
    if isinstance(chosen, Chosen):
        if chosen.type == "function" and chosen.function is not None:
            choice.required = choice.single = True
            choice.names.append(chosen.function.name)
        elif chosen.type == "allowed_tools" and chosen.allowed_tools is not None:
            choice.required = chosen.allowed_tools.mode == "required"
            choice.names.extend(tool.function.name for tool in chosen.allowed_tools.tools)
        else:
            raise malformed(f"tool_choice.{chosen.type}", "is missing")
    if unknown := set(choice.names) - set(offered):
        raise malformed("tool_choice", f"{min(unknown)!r} is none of the tools")
    if choice.required and not offered:
        raise malformed("tool_choice", "only with tools")
    return choice if offered and choice != pb.ToolChoice() else None


def as_sent(error: QuartetError, name: str) -> QuartetError:
    """An error about the form, or about a prompt of tokens, by the name that the client gave it."""
    field = error.metadata.get("field", "")
    if field == "tokens.token_ids":
        name = "prompt"
    elif not name or not field.startswith("structure"):
        return error
    metadata: dict[str, Any] = {**error.metadata, "field": name}
    return QuartetError(error.reason, error.message.replace(field, name, 1), **metadata)
