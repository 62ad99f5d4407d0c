"""The dialect of Qwen3: thoughts between tags, and calls as JSON between others.

    <|im_start|>system\\n{tools}<|im_end|>\\n<|im_start|>user\\n{question}<|im_end|>\\n<|im_start|>assistant\\n
    <think>\\n{thought}\\n</think>\\n\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>
    \\n<|im_start|>user\\n<tool_response>\\n{text}\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

The second line is sampled; text may stand between thought and call.

Source: the chat template of Qwen/Qwen3-8B.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from searchrl_jax.text.calls import Call, Malformed, read_call, require_read_back, write_json
from searchrl_jax.text.pretrained import PretrainedTokenizer
from searchrl_jax.text.segments import Markup, Segments
from searchrl_jax.text.tools import Tool, with_kinds

CONTROLS = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_AFTER = Markup("""
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>""")


class Qwen3Dialect:
    """Renders and parses turns as ids of Qwen3's tokenizer."""

    family = "Qwen3"
    opening = Markup("<|im_start|>assistant\n")

    def __init__(self, tokenizer: PretrainedTokenizer, tools: Sequence[Tool]) -> None:
        """Args:
        tools: that the policy is told of.

        Raises:
            ValueError: the tokenizer is of another family.
        """
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        self._segments = Segments(tokenizer, CONTROLS, self.family)
        self.stop_id = self._segments.id("<|im_end|>")
        self.stop_ids: tuple[int, ...] = (self.stop_id,)

    @property
    def observation_overhead(self) -> int:
        """Ids that `render_observation` adds to those of the text itself."""
        return len(self.render_observation(""))

    def render_prompt(self, question: str, system: str | None = None) -> list[int]:
        """All ids before the first action, the opening of the assistant turn included."""
        words = self._system_words(system)
        before = [Markup("<|im_start|>system\n"), *words, Markup("<|im_end|>\n")] if words else []
        return self._segments.write(*before, *self._question_words(question))

    def render_observation(self, text: str, turn: Sequence[int] = ()) -> list[int]:
        """Ids to append to a turn: what the tool answers, and the opening of the next assistant turn.

        Args:
            turn: the sampled ids; all are answered alike here.
        """
        before, after = Markup("\n<|im_start|>user\n<tool_response>\n"), Markup("\n</tool_response><|im_end|>\n")
        return self._segments.write(before, self._trimmed(text), after, self.opening)

    def render_call(self, call: Call, thinking: str = "") -> list[int]:
        """The ids of one action, the stop included, as a demonstration holds them.

        Raises:
            ValueError: `parse` would not read `call` back.
        """
        words = [Markup("<tool_call>\n"), self._call_text(call), Markup("\n</tool_call><|im_end|>")]
        ids = self._segments.write(*self._thought_words(thinking), *words)
        require_read_back(call, self.parse(ids))
        return ids

    def render_follow_up(self, row: Sequence[int], question: str) -> list[int]:
        """All ids before the first action on a further question, asked after `row`, which ends with an answer.

        The template then leaves all thoughts out. So where there were any, this is no extension of `row`: a new row of
        training begins.
        """
        return [*self._without_thoughts(row), *self._segments.write("\n", *self._question_words(question))]

    def parse(self, ids: Sequence[int]) -> Call | Malformed:
        """Reads the sampled ids of one turn, the stop included if it was sampled.

        Tags count only as control tokens. White space around thought, call and JSON is free.
        """
        segments = self._segments.read_turn(ids, self.stop_ids)
        if not isinstance(segments, Malformed):
            segments = self._after_thought(segments)
        if isinstance(segments, Malformed):
            return segments
        body = self._one_call(segments)
        call = body if isinstance(body, Malformed) else self._read_call(body.strip())
        return call if isinstance(call, Malformed) else with_kinds(call, self.tools)

    # ------------------------------------------------------ what Qwen3.6 does otherwise

    def _system_words(self, system: str | None) -> list[str]:
        if not self.tools:
            return [] if system is None else [system]
        tools = "".join("\n" + json.dumps(tool.schema(), ensure_ascii=False) for tool in self.tools)
        return [*([] if system is None else [system, "\n\n"]), TOOLS_BEFORE, tools, TOOLS_AFTER]

    def _trimmed(self, text: str) -> str:
        return text

    def _thought_words(self, thinking: str) -> list[str]:
        return [Markup("<think>\n"), thinking.strip("\n"), Markup("\n</think>\n\n")] if thinking else []

    def _call_text(self, call: Call) -> str:
        arguments = write_json(dict(call.arguments), call)
        return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}'

    def _read_call(self, body: str) -> Call | Malformed:
        return read_call(body, CONTROLS)

    # ------------------------------------------------------

    def _question_words(self, question: str) -> list[str]:
        return [Markup("<|im_start|>user\n"), self._trimmed(question), Markup("<|im_end|>\n"), self.opening]

    def _after_thought(self, segments: list[int | str]) -> list[int | str] | Malformed:
        """What follows the thought: one that the opening begins, or that the turn itself does, or none."""
        begin, end = self._segments.id("<think>"), self._segments.id("</think>")
        rest = segments
        if not self.opening.endswith("<think>\n"):
            rest = segments[1:] if isinstance(segments[0], str) and not segments[0].strip() else segments
            if rest[:1] != [begin]:
                return segments
            rest = rest[1:]
        if rest and isinstance(rest[0], str):
            rest = rest[1:]
        return rest[1:] if rest[:1] == [end] else Malformed("half_thinking")

    def _one_call(self, segments: list[int | str]) -> str | Malformed:
        """What stands between the tags of the only call."""
        begin, end = self._segments.id("<tool_call>"), self._segments.id("</tool_call>")
        if self._segments.spells_control(segments):
            return Malformed("spelled_control")
        if begin not in segments:
            return Malformed("no_call")
        if segments.count(begin) > 1:
            return Malformed("several_calls")
        at = segments.index(begin)
        if end not in segments[at:]:
            return Malformed("half_call")
        close = segments.index(end, at)
        body = segments[at + 1 : close]
        if any(isinstance(segment, int) for segment in (*segments[:at], *body)):
            return Malformed("control_inside")
        if any(isinstance(segment, int) or segment.strip() for segment in segments[close + 1 :]):
            return Malformed("text_after")
        return "".join(str(segment) for segment in body)

    def _without_thoughts(self, row: Sequence[int]) -> list[int]:
        """`row` without what is between the tags of thoughts, and without the line breaks after them."""
        begin, end = self._segments.id("<think>"), self._segments.id("</think>")
        kept: list[int] = []
        at = 0
        while at < len(row):
            closing = _first_of((end, self.stop_id), row, at) if row[at] == begin else len(row)
            if closing == len(row) or row[closing] != end:
                kept.append(row[at])
                at += 1
                continue
            at = closing + 1
            while at < len(row) and not self.tokenizer.decode([row[at]]).strip("\n"):
                at += 1
        return kept


def _first_of(wanted: Sequence[int], ids: Sequence[int], start: int) -> int:
    """Index of the first id from `start` on that is wanted, or the length of `ids`."""
    return next((index for index in range(start, len(ids)) if ids[index] in wanted), len(ids))
