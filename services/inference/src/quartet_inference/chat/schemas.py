"""What the schemas of tools say of their parameters, to who reads calls and to who makes their grammar.

Both ask here, so that a value is read as what it was made for.

1. A parameter that is a reference to a definition is what that says.
2. A text is what can be nothing else: any other parameter may be JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: The JSON Schema of each parameter of each tool.
Schemas = Mapping[str, Mapping[str, Any]]

#: Keywords that allow and forbid nothing.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
)
DEFINITIONS = ("$defs", "definitions")
#: Of a reference to a reference.
MAX_REFERENCES = 8


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """What the tools say of their parameters."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        whole = resolved(parameters, parameters)
        properties = whole.get("properties") if isinstance(whole, dict) else None
        known = properties if isinstance(properties, dict) else {}
        found[function["name"]] = {key: resolved(one, parameters) for key, one in known.items()}
    return found


def resolved(schema: Any, root: Any) -> Any:
    """A schema, or the definition that it is a reference to and nothing more."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        target = definition(schema["$ref"], root)
        if target is None or schema.keys() - ANNOTATIONS - {"$ref", *DEFINITIONS}:
            return schema
        schema = target
    return schema


def definition(reference: str, root: Any) -> Any:
    """What it refers to; None: something else than a definition."""
    start, _, rest = reference.partition("/")
    group, _, name = rest.partition("/")
    if start != "#" or group not in DEFINITIONS or not isinstance(root, dict):
        return None
    definitions = root.get(group)
    return definitions.get(name) if isinstance(definitions, dict) else None


def is_text(schema: Any) -> bool:
    """Whether it can be nothing but a text."""
    if not isinstance(schema, dict):
        return False
    if "type" not in schema:
        return texts_of(schema) is not None
    return schema["type"] in ("string", ["string"])


def texts_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that it enumerates; None: it does not, or not texts alone."""
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return values
    return None


def plain_types(schema: Mapping[str, Any], root: Any) -> frozenset[str] | None:
    """The types of a value about which nothing else is said; None: there is more to it."""
    keywords = schema.keys() - ANNOTATIONS
    if keywords == {"type"}:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(types) if all(isinstance(one, str) for one in types) else None
    if keywords not in ({"anyOf"}, {"oneOf"}):
        return None
    branches = schema["anyOf" if "anyOf" in keywords else "oneOf"]
    found: set[str] = set()
    for branch in branches if isinstance(branches, list) else [None]:
        one = resolved(branch, root)
        if not isinstance(one, dict) or one.keys() - ANNOTATIONS != {"type"}:
            return None
        if not isinstance(one["type"], str):
            return None
        found.add(one["type"])
    return frozenset(found)
