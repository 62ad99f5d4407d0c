"""The tools that a policy is told of, and the schema that their arguments are read by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from searchrl_jax.text.calls import Call
from searchrl_jax.text.hermes import SUBMIT

STRING, INTEGERS = "string", "integers"  # kinds of parameters

_SCHEMA_OF_KIND: Mapping[str, Mapping[str, Any]] = {
    STRING: {"type": "string"},
    INTEGERS: {"type": "array", "items": {"type": "integer"}},
}


@dataclass(frozen=True)
class Parameter:
    """A required argument; `kind` is STRING or INTEGERS (a list of them)."""

    name: str
    kind: str
    description: str


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        properties = {p.name: {**_SCHEMA_OF_KIND[p.kind], "description": p.description} for p in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": [p.name for p in self.parameters]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def search_tools(names: Sequence[str]) -> tuple[Tool, ...]:
    """A tool for each search that the environment has, and the one that submits."""
    query = Parameter("query", STRING, "What to search for.")
    searches = (Tool(name, f"Searches the documents with {name}; shows numbered results.", (query,)) for name in names)
    ranking = Parameter("ranking", INTEGERS, "Numbers of the documents, the most relevant first.")
    return (*searches, Tool(SUBMIT, "Submits the ranking of documents and ends the task.", (ranking,)))


def with_kinds(call: Call, tools: Sequence[Tool]) -> Call:
    """`call` with numbers that were written as strings read as numbers, where its tool takes numbers.

    Whatever cannot be read so stays as it is; to refuse it is the environment's business.
    """
    kinds = {p.name: p.kind for tool in tools if tool.name == call.name for p in tool.parameters}
    return Call(
        call.name,
        {key: _integers(value) if kinds.get(key) == INTEGERS else value for key, value in call.arguments.items()},
    )


def _integers(value: Any) -> Any:
    items = _number(value) if isinstance(value, str) else value
    return [_number(item) if isinstance(item, str) else item for item in items] if isinstance(items, list) else value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _number(text: str) -> Any:
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text
