"""The dialect of models that have no template for tools: turns with headings, and calls as JSON between tags of text.

    ### user\\n{question}<end>\\n### assistant\\n
    <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><end>
    \\n### user\\n<tool_response>\\n{text}\\n</tool_response><end>\\n### assistant\\n

The second line is sampled; text may stand before the call. <end> is the token that ends a sequence. Where the tokenizer
has <|im_start|> and <|im_end|>, they take the places of "### " and <end>.

A document may spell a heading or a tag, but not the end of a turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from searchrl_jax.text.calls import Call, Malformed, read_call, require_read_back, write_json
from searchrl_jax.text.pretrained import PretrainedTokenizer
from searchrl_jax.text.segments import Markup, Segments
from searchrl_jax.text.tools import Tool, with_kinds

CALL_START, CALL_END, RESPONSE_START, RESPONSE_END = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
TAGS = (CALL_START, CALL_END, RESPONSE_START, RESPONSE_END)
CHAT = ("<|im_start|>", "<|im_end|>")

TOOLS_BEFORE = "You work with tools:\n"
TOOLS_AFTER = f"""
In every turn you call one of them, like this:
{CALL_START}
{{"name": "tool", "arguments": {{"argument": "value"}}}}
{CALL_END}"""


def _described(tool: Tool) -> str:
    """A tool in one line: few tokens, since every row of a small model begins with them."""
    arguments = ", ".join(f"{p.name}: {p.kind}" for p in tool.parameters)
    told = "".join(f" {p.name}: {p.description}" for p in tool.parameters)
    return f"{tool.name}({arguments}) {tool.description}{told}"


class PlainDialect:
    """Renders and parses turns as ids of any tokenizer that has an end token."""

    def __init__(self, tokenizer: PretrainedTokenizer, tools: Sequence[Tool]) -> None:
        """Args:
        tools: that the policy is told of.

        Raises:
            ValueError: the tokenizer has no token to end a turn with.
        """
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        if all(text in tokenizer.control_ids for text in CHAT):
            self._start, self._end = (Markup(text) for text in CHAT)
        else:
            ends = [text for text, id_ in tokenizer.control_ids.items() if id_ == tokenizer.end_id]
            if not ends:
                raise ValueError(
                    "expected a tokenizer with an end token, got none; name one as eos_token in tokenizer_config.json"
                )
            self._start, self._end = Markup("### "), Markup(ends[0])
        self._controls = [text for text in (self._start, self._end) if text in tokenizer.control_ids]
        self._segments = Segments(tokenizer, self._controls, "plain")
        self.stop_id = self._segments.id(self._end)
        self.stop_ids: tuple[int, ...] = (self.stop_id,)

    @property
    def observation_overhead(self) -> int:
        """Ids that `render_observation` adds to those of the text itself."""
        return len(self.render_observation(""))

    def render_prompt(self, question: str, system: str | None = None) -> list[int]:
        """All ids before the first action, the opening of the assistant turn included."""
        words = [] if system is None else [system]
        if self.tools:
            words += ["\n\n" if words else "", TOOLS_BEFORE]
            words += [_described(tool) + "\n" for tool in self.tools]
            words.append(TOOLS_AFTER)
        before = [self._start, "system\n", *words, self._end, "\n"] if words else []
        return self._segments.write(*before, self._start, "user\n", question, self._end, "\n", *self._opening())

    def render_observation(self, text: str, turn: Sequence[int] = ()) -> list[int]:
        """Ids to append to a turn: what the tool answers, and the opening of the next assistant turn.

        Args:
            turn: the sampled ids; all are answered alike here.
        """
        words = ["\n", self._start, f"user\n{RESPONSE_START}\n", text, f"\n{RESPONSE_END}", self._end, "\n"]
        return self._segments.write(*words, *self._opening())

    def render_call(self, call: Call) -> list[int]:
        """The ids of one action, the stop included, as a demonstration holds them.

        Raises:
            ValueError: `parse` would not read `call` back.
        """
        written = write_json({"name": call.name, "arguments": dict(call.arguments)}, call)
        ids = self._segments.write(f"{CALL_START}\n", written, f"\n{CALL_END}", self._end)
        require_read_back(call, self.parse(ids))
        return ids

    def parse(self, ids: Sequence[int]) -> Call | Malformed:
        """Reads the sampled ids of one turn, the stop included if it was sampled."""
        segments = self._segments.read_turn(ids, self.stop_ids)
        if isinstance(segments, Malformed):
            return segments
        text = "".join(segment for segment in segments if isinstance(segment, str))
        if len(segments) != 1 or any(control in text for control in self._controls):
            return Malformed("control_inside" if segments != [text] else "spelled_control")
        if CALL_START not in text:
            return Malformed("no_call")
        if text.count(CALL_START) > 1:
            return Malformed("several_calls")
        before, _, rest = text.partition(CALL_START)
        if any(tag in before for tag in TAGS):
            return Malformed("spelled_control")
        body, end, after = rest.partition(CALL_END)
        if not end:
            return Malformed("half_call")
        if after.strip():
            return Malformed("text_after")
        call = read_call(body.strip(), (*self._controls, *TAGS))
        return call if isinstance(call, Malformed) else with_kinds(call, self.tools)

    def _opening(self) -> list[str]:
        return [self._start, "assistant\n"]
