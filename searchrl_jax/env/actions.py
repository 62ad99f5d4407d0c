"""From a parsed call to what the environment can do: search, submit, or refuse with a reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from searchrl_jax.text.hermes import SUBMIT, Call

MAX_RANKING = 10  # nDCG@10 reads no further


@dataclass(frozen=True)
class Search:
    """Run `tool` with `query`, which is stripped and not empty."""

    tool: str
    query: str


@dataclass(frozen=True)
class Submit:
    """End the episode with these local references, best first. Whether they were shown is the episode's to check.

    A repeated reference counts once, where it stands first: twice it would raise nDCG, and so it only wastes a place.
    """

    ranking: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """A call that does nothing but use up its turn.

    Attributes:
        error: short code for metrics: unknown_tool, invalid_arguments, empty_query, unknown_reference.
        message: what the policy reads.
    """

    error: str
    message: str


def read_action(call: Call, tools: Collection[str]) -> Search | Submit | Refused:
    """The action that `call` asks for, with its arguments checked; no tool runs on arguments that don't pass."""
    if call.name == SUBMIT:
        return _read_submit(call.arguments)
    if call.name not in tools:
        # The policy's own text is not quoted back: it may be long, and it is the policy's.
        return Refused("unknown_tool", f"error: unknown tool, the tools are {' '.join((*tools, SUBMIT))}")
    if set(call.arguments) != {"query"}:
        return Refused("invalid_arguments", f"error: invalid arguments, {call.name} takes query only")
    query = call.arguments["query"]
    if not isinstance(query, str):
        return Refused("invalid_arguments", "error: invalid arguments, query must be a string")
    query = query.strip()
    return Search(call.name, query) if query else Refused("empty_query", "error: empty query")


def _read_submit(arguments: Mapping[str, Any]) -> Submit | Refused:
    if set(arguments) != {"ranking"}:
        return Refused("invalid_arguments", "error: invalid arguments, submit takes ranking only")
    ranking = arguments["ranking"]
    if not isinstance(ranking, list) or not all(type(reference) is int for reference in ranking):
        return Refused("invalid_arguments", "error: invalid arguments, ranking must be a list of integers")
    if not 1 <= len(ranking) <= MAX_RANKING:
        return Refused(
            "invalid_arguments", f"error: invalid arguments, ranking must hold 1 to {MAX_RANKING} references"
        )
    return Submit(tuple(dict.fromkeys(ranking)))


def short_number(number: int) -> str:
    """`number` in digits, or words where it is absurd, so that an error stays short whatever the policy wrote."""
    return str(number) if abs(number) < 10_000 else "of that size"
