"""Tool calls: what a turn is read as, and the JSON that several dialects write them in."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

CLOSING_SCAFFOLDS = ('"}}', "]}}")

MALFORMED_TEXT: Mapping[str, str] = {
    "empty": "malformed call: the turn is empty",
    "missing_stop": "malformed call: the turn does not end with the end of turn",
    "wrong_stop": "malformed call: the turn ends with another token than the one that ends a call",
    "no_call": "malformed call: the turn must be one tool call",
    "several_calls": "malformed call: more than one tool call in a turn",
    "text_before": "malformed call: text before the tool call",
    "text_after": "malformed call: text after the tool call",
    "half_call": "malformed call: the tool call is not closed",
    "half_thinking": "malformed call: the thinking is not closed",
    "half_message": "malformed call: a message without its header, channel or end",
    "wrong_channel": "malformed call: a tool is called on the commentary channel",
    "wrong_recipient": "malformed call: the recipient must be functions and the name of the tool",
    "control_inside": "malformed call: a control token inside the tool call",
    "spelled_control": "malformed call: a control token spelled as text",
    "scaffold_inside": "malformed call: call syntax inside an argument",
    "unknown_token": "malformed call: a token outside the vocabulary",
    "not_text": "malformed call: not valid text",
    "not_function": "malformed call: the call must name one function and close it",
    "not_parameters": "malformed call, invalid arguments: a function holds parameters only",
    "half_parameter": "malformed call, invalid arguments: a parameter is not closed",
    "half_string": "malformed call, invalid arguments: a string is not closed",
    "wrong_quotes": "malformed call, invalid arguments: strings stand between quote tokens",
    "not_json": "malformed call, invalid arguments: not one JSON object",
    "not_finite": "malformed call, invalid arguments: a number is not finite",
    "duplicate_key": "malformed call, invalid arguments: a key is repeated",
    "wrong_keys": "malformed call: the keys must be name and arguments",
    "name_not_string": "malformed call: name must be a string",
    "arguments_not_object": "malformed call, invalid arguments: arguments must be an object",
}


@dataclass(frozen=True)
class Call:
    """A well-formed call: any tool name, any JSON arguments. Whether the tool exists is the environment's business."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Malformed:
    """A turn that is not exactly one call; `reason` is a key of `MALFORMED_TEXT`."""

    reason: str

    @property
    def message(self) -> str:
        """What the policy reads. Fixed text: nothing that the policy wrote comes back in it."""
        return MALFORMED_TEXT[self.reason]


class _BadJsonError(ValueError):
    """Carries the `Malformed.reason` out of a json hook."""


def read_object(text: str) -> dict[str, Any] | Malformed:
    """One JSON object and nothing around it; keys are unique, numbers finite."""
    # json.loads forgives white space around the object; a caller that does so, too, strips it.
    if not (text.startswith("{") and text.endswith("}")):
        return Malformed("not_json")
    try:
        value: dict[str, Any] = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except _BadJsonError as error:
        return Malformed(str(error))
    except (ValueError, RecursionError):  # JSONDecodeError, integers past Python's digit limit, deep nesting
        return Malformed("not_json")
    return value


def read_call(text: str, control: Collection[str]) -> Call | Malformed:
    """The call that a JSON object with exactly the keys name and arguments makes.

    Args:
        control: strings that no argument may hold.
    """
    value = read_object(text)
    if isinstance(value, Malformed):
        return value
    if set(value) != {"name", "arguments"}:
        return Malformed("wrong_keys")
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str):
        return Malformed("name_not_string")
    if not isinstance(arguments, dict):
        return Malformed("arguments_not_object")
    return checked(Call(name, arguments), control, CLOSING_SCAFFOLDS)


def checked(call: Call, control: Collection[str], scaffolds: Collection[str]) -> Call | Malformed:
    """`call`, if none of its strings holds a control string, call syntax or half a character."""
    for string in (call.name, *_strings(call.arguments)):
        # JSON escapes can spell what the raw text does not show ("\u003ctool_call\u003e", "\ud800", '\"}}').
        if any(text in string for text in control):
            return Malformed("control_inside")
        if any(scaffold in string for scaffold in scaffolds):
            return Malformed("scaffold_inside")
        if any("\ud800" <= character <= "\udfff" for character in string):
            return Malformed("not_text")
    return call


def write_json(value: Any, call: Call, separators: tuple[str, str] = (", ", ": ")) -> str:
    """JSON of an argument, or of all, of `call`.

    Raises:
        ValueError: JSON cannot hold it.
    """
    try:
        return json.dumps(value, ensure_ascii=False, separators=separators, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"expected JSON arguments, got {call}: {error}; use strings, finite numbers and lists"
        ) from error


def require_read_back(call: Call, read_back: Call | Malformed) -> None:
    """Checks that what `call` was written as is read as the same call, up to the composition of its characters, which
    some tokenizers normalise.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(read_back, Call) or _composed(read_back) != _composed(call):
        why = read_back.message if isinstance(read_back, Malformed) else "it reads back as another call"
        raise ValueError(f"expected a call that the dialect can write, got {call}: {why}; leave such text out")


def _composed(value: Any) -> Any:
    """`value` with all its strings in Unicode's composed form."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, Mapping):
        return {_composed(key): _composed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_composed(item) for item in value]
    return (_composed(value.name), _composed(value.arguments)) if isinstance(value, Call) else value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise _BadJsonError("duplicate_key")
    return mapping


def _refuse_constant(_: str) -> NoReturn:
    raise _BadJsonError("not_finite")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):  # 1e999 is infinity to Python
        raise _BadJsonError("not_finite")
    return value


def _strings(arguments: Mapping[str, Any]) -> list[str]:
    """All keys and string values of `arguments`, at any depth."""
    found: list[str] = []
    waiting: list[Any] = [arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            found.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return found
