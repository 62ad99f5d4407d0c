"""The dialect of Gemma 4: calls in a notation of its own, whose strings stand between quote tokens.

    <bos><|turn>system\\n<|think|>\\n{system}<|tool>declaration:...<tool|><turn|>\\n
    <|turn>user\\n{question}<turn|>\\n<|turn>model\\n
    <|channel>thought\\n{thought}\\n<channel|><|tool_call>call:bm25_search{query:<|"|>{query}<|"|>}<tool_call|>
    <|tool_response>
    response:bm25_search{value:<|"|>{text}<|"|>}<tool_response|>

The third and fourth lines are sampled, without the break: what ends a call is the token that begins its response. A
turn that ends with <turn|> instead is answered as a user would.

To generate after a response, the template's last revision opens the thought itself, and leaves that out again where
nothing was thought. Here the policy opens it, so that the history is what the template shows whether it thought or not.

Source: the chat template of google/gemma-4-31B-it of 2026-07-09, with `enable_thinking`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from searchrl_jax.text.calls import Call, Malformed, checked, read_object, require_read_back
from searchrl_jax.text.pretrained import PretrainedTokenizer
from searchrl_jax.text.segments import Markup, Segments
from searchrl_jax.text.tools import INTEGERS, STRING, Tool, with_kinds

QUOTE = Markup('<|"|>')
CONTROLS = (
    "<bos>",
    "<|turn>",
    "<turn|>",
    "<|think|>",
    "<|tool>",
    "<tool|>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    QUOTE,
)
UNKNOWN = "unknown"  # the template's name of a tool that answers what is no call

_TYPES = {STRING: 'type:<|"|>STRING<|"|>', INTEGERS: 'items:{type:<|"|>INTEGER<|"|>},type:<|"|>ARRAY<|"|>'}
_CALL = re.compile(r'\s*call:\s*([^\s{}"]+)\s*(\{.*\})\s*', re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([^\W\d][\w.-]*)(\s*:)")


class Gemma4Dialect:
    """Renders and parses turns as ids of Gemma 4's tokenizer."""

    def __init__(self, tokenizer: PretrainedTokenizer, tools: Sequence[Tool]) -> None:
        """Args:
        tools: that the policy is told of.

        Raises:
            ValueError: the tokenizer is of another family.
        """
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        self._segments = Segments(tokenizer, CONTROLS, "Gemma 4")
        self.stop_id = self._segments.id("<|tool_response>")
        self.stop_ids: tuple[int, ...] = (self.stop_id, self._segments.id("<turn|>"))

    @property
    def observation_overhead(self) -> int:
        """Ids that `render_observation` adds to those of the text itself, after a call of the longest name."""
        return max(len(self._response(name, "")) for name in (UNKNOWN, *(tool.name for tool in self.tools)))

    def render_prompt(self, question: str, system: str | None = None) -> list[int]:
        """All ids before the first action, the opening of the model's turn included."""
        before = Markup("<bos><|turn>system\n<|think|>\n")
        tools = [word for tool in self.tools for word in _declaration(tool)]
        after = Markup("<turn|>\n")
        return self._segments.write(before, (system or "").strip(), *tools, after, *_question_words(question))

    def render_observation(self, text: str, turn: Sequence[int] = ()) -> list[int]:
        """Ids to append to a turn: the response of the tool that it calls.

        Args:
            turn: the sampled ids. Where they end the whole turn, a user's turn is the answer.
        """
        if turn and turn[-1] != self.stop_id:
            return self._segments.write("\n", *_question_words(text))
        call = self.parse(turn)
        return self._response(call.name if isinstance(call, Call) else UNKNOWN, text)

    def render_call(self, call: Call, thinking: str = "") -> list[int]:
        """The ids of one action, the stop included, as a demonstration holds them.

        Raises:
            ValueError: `parse` would not read `call` back.
        """
        thought = [Markup("<|channel>thought\n"), thinking, Markup("\n<channel|>")]
        try:
            arguments = _mapping_words(call.arguments)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"expected JSON arguments, got {call}: {error}; use strings, numbers and lists") from error
        ids = self._segments.write(
            *(thought if thinking else []),
            Markup("<|tool_call>"),
            f"call:{call.name}",
            *arguments,
            Markup("<tool_call|><|tool_response>"),
        )
        require_read_back(call, self.parse(ids))
        return ids

    def render_follow_up(self, row: Sequence[int], question: str) -> list[int]:
        """All ids before the first action on a further question, asked after `row`, which ends with an answer.

        The template then leaves all thoughts out. So where there were any, this is no extension of `row`: a new row of
        training begins.
        """
        begin, end = self._segments.id("<|channel>"), self._segments.id("<channel|>")
        kept: list[int] = []
        is_thought = False
        for id_ in row:
            is_thought |= id_ == begin
            if not is_thought:
                kept.append(id_)
            is_thought &= id_ != end
        return [*kept, *self._segments.write("\n", *_question_words(question))]

    def parse(self, ids: Sequence[int]) -> Call | Malformed:
        """Reads the sampled ids of one turn, the stop included if it was sampled.

        A thought or none, then one call. White space around them, and in the call outside its strings, is free; a key
        may stand between quote tokens, too.
        """
        segments = self._segments.read_turn(ids, self.stop_ids)
        if isinstance(segments, Malformed):
            return segments
        begin, end = self._segments.id("<|channel>"), self._segments.id("<channel|>")
        rest = _without_space(segments)
        if rest[:1] == [begin]:
            if rest[2:3] != [end]:
                return Malformed("half_thinking")
            rest = _without_space(rest[3:])
        body = self._one_call(rest)
        if isinstance(body, Malformed):
            return body
        if ids[-1] != self.stop_id:
            return Malformed("wrong_stop")
        call = self._read_call(body)
        return call if isinstance(call, Malformed) else with_kinds(call, self.tools)

    def _one_call(self, segments: list[int | str]) -> list[int | str] | Malformed:
        """What stands between the tokens of the only call: text and quote tokens."""
        begin, end = self._segments.id("<|tool_call>"), self._segments.id("<tool_call|>")
        if self._segments.spells_control(segments):
            return Malformed("spelled_control")
        if begin not in segments:
            return Malformed("no_call")
        if segments[0] != begin:
            return Malformed("text_before")
        if segments.count(begin) > 1:
            return Malformed("several_calls")
        if end not in segments:
            return Malformed("half_call")
        close = segments.index(end)
        if _without_space(segments[close + 1 :]):
            return Malformed("text_after")
        return segments[1:close]

    def _read_call(self, body: list[int | str]) -> Call | Malformed:
        """The call in Gemma's notation, by way of JSON: strings are escaped, and bare keys quoted."""
        quote = self._segments.id(QUOTE)
        words: list[str] = []
        string: str | None = None
        for segment in body:
            if isinstance(segment, int):
                if segment != quote:
                    return Malformed("control_inside")
                if string is not None:
                    words.append(json.dumps(string))
                string = "" if string is None else None
            elif string is not None:
                string = segment
            elif '"' in segment:
                return Malformed("wrong_quotes")
            else:
                words.append(_BARE_KEY.sub(r'\1"\2"\3', segment))
        if string is not None:
            return Malformed("half_string")
        found = _CALL.fullmatch("".join(words))
        if not found:
            return Malformed("not_function")
        arguments = read_object(found[2])
        return arguments if isinstance(arguments, Malformed) else checked(Call(found[1], arguments), CONTROLS, ())

    def _response(self, name: str, text: str) -> list[int]:
        """What follows the token that begins a response."""
        return self._segments.write(f"response:{name}{{value:", QUOTE, text, QUOTE, "}", Markup("<tool_response|>"))


def _question_words(question: str) -> list[str]:
    return [Markup("<|turn>user\n"), question.strip(), Markup("<turn|>\n<|turn>model\n")]


def _declaration(tool: Tool) -> list[str]:
    """The words in which the template tells of a tool; parameters stand in the order of their names."""
    words = [Markup("<|tool>"), f"declaration:{tool.name}{{description:", QUOTE, tool.description, QUOTE]
    words.append(",parameters:{")
    if tool.parameters:
        words.append("properties:{")
        for number, parameter in enumerate(sorted(tool.parameters, key=lambda p: p.name.lower())):
            words += [f"{',' if number else ''}{parameter.name}:{{description:", QUOTE, parameter.description, QUOTE]
            words += [",", Markup(_TYPES[parameter.kind]), "}"]
        words.append("},required:[")
        for number, parameter in enumerate(tool.parameters):
            words += ["," if number else "", QUOTE, parameter.name, QUOTE]
        words.append("],")
    return [*words, Markup('type:<|"|>OBJECT<|"|>}}<tool|>')]


def _value_words(value: Any) -> list[str]:
    """A value in Gemma's notation.

    Raises:
        TypeError: JSON has no such value.
    """
    if isinstance(value, str):
        return [QUOTE, value, QUOTE]
    if isinstance(value, Mapping):
        return _mapping_words(value)
    if isinstance(value, list):
        words = [word for item in value for word in (",", *_value_words(item))]
        return ["[", *words[1:], "]"]
    return [json.dumps(value)]


def _mapping_words(mapping: Mapping[str, Any]) -> list[str]:
    """A mapping, its keys bare and in order, whatever their case."""
    words = [word for key in sorted(mapping, key=str.lower) for word in (",", f"{key}:", *_value_words(mapping[key]))]
    return ["{", *words[1:], "}"]


def _without_space(segments: list[int | str]) -> list[int | str]:
    """`segments` without a first and a last one of white space."""
    is_blank = [isinstance(segment, str) and not segment.strip() for segment in segments]
    first = 1 if is_blank[:1] == [True] else 0
    last = len(segments) - (1 if len(segments) > first and is_blank[-1] else 0)
    return segments[first:last]
