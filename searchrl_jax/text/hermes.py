"""The hermes dialect: turns and tool calls as token ids, append only.

    <|im_start|>user\\n{question}<|im_end|>\\n<|im_start|>assistant\\n          render_prompt
    <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>        sampled by the policy, read by parse
    \\n<|im_start|>tool\\n<tool_response>{text}</tool_response><|im_end|>
    \\n<|im_start|>assistant\\n                                              render_observation (one run, no line break)

Nothing is decoded and tokenised again: `render_*` return the ids to append, `parse` reads the ids that were sampled.

The parser accepts exactly one call and nothing else, since a policy trained against a lenient parser learns its holes:
a trial's reward was hacked with '"}}' repeated inside queries. So a query may not hold a control string or closing
scaffolding, in whatever way it is spelled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from searchrl_jax.text.tokenizer import (
    CALL_END,
    CALL_START,
    CONTROL_TOKENS,
    RESPONSE_END,
    RESPONSE_START,
    TURN_END,
    TURN_START,
    Tokenizer,
)

SUBMIT = "submit"
CLOSING_SCAFFOLDS = ('"}}', "]}}")

MALFORMED_TEXT: Mapping[str, str] = {
    "empty": "malformed call: the turn is empty",
    "missing_stop": "malformed call: the turn does not end with the end of turn",
    "no_call": "malformed call: the turn must be one tool call",
    "text_before": "malformed call: text before the tool call",
    "text_after": "malformed call: text after the tool call",
    "half_call": "malformed call: the tool call is not closed",
    "control_inside": "malformed call: a control token inside the tool call",
    "spelled_control": "malformed call: a control token spelled as text",
    "scaffold_inside": "malformed call: call syntax inside an argument",
    "unknown_token": "malformed call: a token outside the vocabulary",
    "not_text": "malformed call: not valid text",
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


def search_call(tool: str, query: str, *, begins_with_space: bool = True) -> Call:
    """A search as demonstrations write it.

    Args:
        begins_with_space: true for names, which keep the pieces they have in an observation, where a space comes first;
            false for a quotation, whose first word follows a quotation mark in the question and in the call alike.
    """
    return Call(tool, {"query": (" " if begins_with_space else "") + " ".join(query.split())})


def submit_call(ranking: Sequence[int]) -> Call:
    """The call that submits local references, best first."""
    return Call(SUBMIT, {"ranking": list(ranking)})


def call_scaffolds(tools: Sequence[str]) -> tuple[str, ...]:
    """The JSON scaffolding of searches with `tools` and of `submit`, for `train_tokenizer`.

    A comma with its space is no scaffold: it would take from the name after it the leading space that belongs to its
        pieces.
    """
    searches = (f'{{"name": {json.dumps(tool)}, "arguments": {{"query": "' for tool in tools)
    return (*searches, f'{{"name": "{SUBMIT}", "arguments": {{"ranking": [', *CLOSING_SCAFFOLDS)


def call_text(call: Call) -> str:
    """The JSON object of `call`: `", "` between arguments, none inside a list, so that references are bare digits.

    Raises:
        ValueError: `call` cannot be said in the dialect: it would not be read back as itself.
    """
    arguments = ", ".join(
        f"{json.dumps(key, ensure_ascii=False)}: {_dumps(value, call)}" for key, value in call.arguments.items()
    )
    text = f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {{{arguments}}}}}'
    read_back = _parse_object(text)
    if isinstance(read_back, Malformed) or read_back != Call(call.name, dict(call.arguments)):
        why = read_back.message if isinstance(read_back, Malformed) else "it reads back as another call"
        raise ValueError(f"expected a call that the dialect can write, got {call}: {why}; leave such text out")
    return text


def _dumps(value: Any, call: Call) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"expected JSON arguments, got {call}: {error}; use strings, finite numbers and lists"
        ) from error


def parse_call(text: str) -> Call | Malformed:
    """Reads one turn given as text; `<|im_end|>` at its end is optional, since chat APIs take it off.

    Accepts `<tool_call>`, one JSON object with exactly the keys name (string) and arguments (object), `</tool_call>`,
    and nothing before, between or after, white space included. Ids say more than text (a spelled tag is not a tag):
    where ids are at hand use `HermesDialect.parse`.
    """
    text = text.removesuffix(TURN_END)
    if not text:
        return Malformed("empty")
    if not text.startswith(CALL_START):
        return Malformed("text_before" if CALL_START in text else "no_call")
    if CALL_END not in text:
        return Malformed("half_call")
    if not text.endswith(CALL_END):
        return Malformed("text_after")
    # "<tool_call>" overlaps nothing in "</tool_call>", so the two ends are two tags.
    body = text[len(CALL_START) : -len(CALL_END)]
    if any(control in body for control in CONTROL_TOKENS):
        return Malformed("control_inside")
    return _parse_object(body)


class HermesDialect:
    """Renders and parses turns as ids of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        control, header = tokenizer.control_ids, tokenizer.header_ids
        self.tokenizer = tokenizer
        self.stop_id: int = control[TURN_END]
        self._call_start, self._call_end = control[CALL_START], control[CALL_END]
        self._reserved = frozenset(control.values()) | frozenset(header.values())
        newline = tokenizer.encode("\n")
        self._open_system = [control[TURN_START], header["system\n"]]
        self._open_user = [control[TURN_START], header["user\n"]]
        self._open_assistant = [*newline, control[TURN_START], header["assistant\n"]]
        self._open_response = [*newline, control[TURN_START], header["tool\n"], control[RESPONSE_START]]
        self._close_response = [control[RESPONSE_END], self.stop_id]
        self._newline = newline

    @property
    def observation_overhead(self) -> int:
        """Ids that `render_observation` adds to those of the text itself."""
        return len(self._open_response) + len(self._close_response) + len(self._open_assistant)

    def render_prompt(self, question: str, system: str | None = None) -> list[int]:
        """All ids before the first action, the opening of the assistant turn included."""
        ids = []
        if system is not None:
            ids += [*self._open_system, *self.tokenizer.encode(system), self.stop_id, *self._newline]
        return [*ids, *self._open_user, *self.tokenizer.encode(question), self.stop_id, *self._open_assistant]

    def render_observation(self, text: str) -> list[int]:
        """Ids to append to a turn that ended with `stop_id`: the tool's turn, and the next assistant turn's opening."""
        return [*self._open_response, *self.tokenizer.encode(text), *self._close_response, *self._open_assistant]

    def render_call(self, call: Call) -> list[int]:
        """The ids of one action, `stop_id` included, as a demonstration holds them.

        Raises:
            ValueError: `parse` would not read `call` back.
        """
        return [self._call_start, *self.tokenizer.encode(call_text(call)), self._call_end, self.stop_id]

    def parse(self, ids: Sequence[int]) -> Call | Malformed:
        """Reads the sampled ids of one turn, `stop_id` included if it was sampled.

        Tags count only as control ids. A control id or role header inside the call, or a control string spelled by
        ordinary pieces anywhere, is malformed.
        """
        if not ids:
            return Malformed("empty")
        if not all(0 <= id_ < self.tokenizer.vocab_size for id_ in ids):
            return Malformed("unknown_token")
        if ids[-1] != self.stop_id:
            return Malformed("missing_stop")
        turn = list(ids[:-1])
        if not turn:
            return Malformed("empty")
        for run in _runs_without(turn, self._reserved):
            if any(control in self.tokenizer.decode(run) for control in CONTROL_TOKENS):
                return Malformed("spelled_control")
        if turn[0] != self._call_start:
            return Malformed("text_before" if self._call_start in turn else "no_call")
        if self._call_end not in turn:
            return Malformed("half_call")
        if turn[-1] != self._call_end:
            return Malformed("text_after")
        body = turn[1:-1]
        if not self._reserved.isdisjoint(body):
            return Malformed("control_inside")
        try:
            text = self.tokenizer.decode_bytes(body).decode("utf-8")
        except UnicodeDecodeError:
            return Malformed("not_text")
        return _parse_object(text)


def _runs_without(ids: Sequence[int], reserved: frozenset[int]) -> list[list[int]]:
    """The maximal runs of ordinary ids."""
    runs: list[list[int]] = [[]]
    for id_ in ids:
        if id_ in reserved:
            runs.append([])
        else:
            runs[-1].append(id_)
    return runs


def _parse_object(text: str) -> Call | Malformed:
    """Reads what stands between the tags."""
    # json.loads forgives white space around the object; the grammar does not.
    if not (text.startswith("{") and text.endswith("}")):
        return Malformed("not_json")
    try:
        value = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except _BadJsonError as error:
        return Malformed(str(error))
    except (ValueError, RecursionError):  # JSONDecodeError, integers past Python's digit limit, deep nesting
        return Malformed("not_json")
    if set(value) != {"name", "arguments"}:
        return Malformed("wrong_keys")
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str):
        return Malformed("name_not_string")
    if not isinstance(arguments, dict):
        return Malformed("arguments_not_object")
    for string in (name, *_strings(arguments)):
        # JSON escapes can spell what the raw text does not show ("\u003ctool_call\u003e", "\ud800", '\"}}').
        if any(control in string for control in CONTROL_TOKENS):
            return Malformed("control_inside")
        if any(scaffold in string for scaffold in CLOSING_SCAFFOLDS):
            return Malformed("scaffold_inside")
        if any("\ud800" <= character <= "\udfff" for character in string):
            return Malformed("not_text")
    return Call(name, arguments)


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
