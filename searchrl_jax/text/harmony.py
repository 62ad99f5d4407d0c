"""The dialect of GPT-OSS, Harmony: messages on channels.

    <|start|>system<|message|>...<|end|><|start|>developer<|message|>{tools}<|end|>
    <|start|>user<|message|>{question}<|end|><|start|>assistant
    <|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.bm25_search<|channel|>commentary json
    <|message|>{"query": ...}<|call|>
    <|start|>functions.bm25_search to=assistant<|channel|>commentary<|message|>"{text}"<|end|><|start|>assistant

The third and fourth lines are sampled, without the break. The recipient may also stand after the channel, where the
models mostly write it. A turn that ends with <|return|> instead, or addresses nobody, is answered as a user would.

Source: the chat template of openai/gpt-oss-20b; https://github.com/openai/harmony/blob/main/docs/format.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from searchrl_jax.text.calls import (
    CLOSING_SCAFFOLDS,
    Call,
    Malformed,
    checked,
    read_object,
    require_read_back,
    write_json,
)
from searchrl_jax.text.pretrained import PretrainedTokenizer
from searchrl_jax.text.segments import Markup, Segments
from searchrl_jax.text.tools import INTEGERS, STRING, Tool, with_kinds

CONTROLS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)

# The template asks for today's date. A run that is resumed tomorrow must read the same ids, so it is one day for all.
DATE = "2025-08-05"
SYSTEM = Markup(
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    f"Knowledge cutoff: 2024-06\nCurrent date: {DATE}\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
SYSTEM_OF_TOOLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
OPENING = Markup("<|start|>assistant")
UNKNOWN = "functions.unknown"

_TYPES = {STRING: "string", INTEGERS: "number[]"}
_HEADER = re.compile(
    r"assistant(?: to=(?P<to>[\w.-]+))?\s*<\|channel\|>(?P<channel>\w+)(?: to=(?P<to_late>[\w.-]+))?"
    r"\s*(?:(?:<\|constrain\|>)?\s*json)?\s*"
)


class HarmonyDialect:
    """Renders and parses turns as ids of GPT-OSS's tokenizer."""

    def __init__(self, tokenizer: PretrainedTokenizer, tools: Sequence[Tool]) -> None:
        """Args:
        tools: that the policy is told of.

        Raises:
            ValueError: the tokenizer is of another family.
        """
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        self._segments = Segments(tokenizer, CONTROLS, "GPT-OSS")
        self.stop_id = self._segments.id("<|call|>")
        self.stop_ids: tuple[int, ...] = (self.stop_id, self._segments.id("<|return|>"))

    @property
    def observation_overhead(self) -> int:
        """Ids that `render_observation` adds to those of the text itself, after a call of the longest name.

        Line breaks and quotation marks in the text are escaped, and that is not counted.
        """
        recipients = (UNKNOWN, *(f"functions.{tool.name}" for tool in self.tools))
        return max(len(self._tool_message(recipient, "")) for recipient in recipients)

    def render_prompt(self, question: str, system: str | None = None) -> list[int]:
        """All ids before the first action, the opening of the assistant's message included."""
        words = [SYSTEM, SYSTEM_OF_TOOLS if self.tools else "", Markup("<|end|>")]
        if system or self.tools:
            words.append(Markup("<|start|>developer<|message|>"))
            words += ["# Instructions\n\n", system, "\n\n"] if system else []
            words += ["# Tools\n\n## functions\n\n", _namespace(self.tools)] if self.tools else []
            words.append(Markup("<|end|>"))
        return self._segments.write(*words, *_question_words(question))

    def render_observation(self, text: str, turn: Sequence[int] = ()) -> list[int]:
        """Ids to append to a turn: the message of the tool that it calls, and the opening of the assistant's next.

        Args:
            turn: the sampled ids. Where they address nobody, a user's message is the answer.
        """
        recipient = self._recipient(turn)
        if recipient is None:
            return self._segments.write(*_question_words(text))
        return self._tool_message(recipient, text)

    def render_call(self, call: Call, thinking: str = "") -> list[int]:
        """The ids of one action, the stop included, as a demonstration holds them.

        Raises:
            ValueError: `parse` would not read `call` back.
        """
        arguments = write_json(dict(call.arguments), call)
        thought = [Markup("<|channel|>analysis<|message|>"), thinking, Markup("<|end|><|start|>assistant")]
        ids = self._segments.write(
            *(thought if thinking else []),
            f" to=functions.{call.name}",
            Markup("<|channel|>commentary json<|message|>"),
            arguments,
            Markup("<|call|>"),
        )
        require_read_back(call, self.parse(ids))
        return ids

    def render_follow_up(self, row: Sequence[int], question: str) -> list[int]:
        """All ids before the first action on a further question, asked after `row`, which ends with an answer.

        The template then leaves all analysis out and ends the answer as any message. So this is no extension of `row`:
        a new row of training begins.
        """
        start, end = self._segments.id("<|start|>"), self._segments.id("<|end|>")
        analysis = self._segments.write(Markup("<|start|>assistant<|channel|>analysis<|message|>"))
        kept: list[int] = []
        is_dropped = False
        for at, id_ in enumerate(row):
            if id_ == start:
                is_dropped = list(row[at : at + len(analysis)]) == analysis
            if not is_dropped:
                kept.append(id_)
        if kept[-1:] == [self._segments.id("<|return|>")]:
            kept[-1] = end
        return [*kept, *self._segments.write(*_question_words(question))]

    def parse(self, ids: Sequence[int]) -> Call | Malformed:
        """Reads the sampled ids of one turn, the stop included if it was sampled.

        Any number of messages on analysis, or on commentary to nobody, then one on commentary to a function.
        """
        segments = self._segments.read_turn(ids, self.stop_ids)
        if isinstance(segments, Malformed):
            return segments
        messages = self._messages(segments)
        if isinstance(messages, Malformed):
            return messages
        *before, (recipient, channel, body) = messages
        for earlier_recipient, earlier_channel, _ in before:
            if earlier_recipient is not None:
                return Malformed("several_calls")
            if earlier_channel not in ("analysis", "commentary"):
                return Malformed("text_before")
        if recipient is None:
            return Malformed("spelled_control" if self._segments.spells_control([body]) else "no_call")
        if ids[-1] != self.stop_id:
            return Malformed("wrong_stop")
        if channel != "commentary":
            return Malformed("wrong_channel")
        if not recipient.startswith("functions.") or recipient == "functions.":
            return Malformed("wrong_recipient")
        if self._segments.spells_control([body]):
            return Malformed("spelled_control")
        arguments = read_object(body.strip())
        if isinstance(arguments, Malformed):
            return arguments
        call = checked(Call(recipient.removeprefix("functions."), arguments), CONTROLS, CLOSING_SCAFFOLDS)
        return call if isinstance(call, Malformed) else with_kinds(call, self.tools)

    def _messages(self, segments: list[int | str]) -> list[tuple[str | None, str, str]] | Malformed:
        """Recipient, channel and text of each message of a turn; the last one's end is the stop, which is not here."""
        start, end, message = (self._segments.id(text) for text in ("<|start|>", "<|end|>", "<|message|>"))
        in_header = {self._segments.id(text): text for text in ("<|channel|>", "<|constrain|>")}
        rest: list[int | str] = [start, "assistant", *segments, end]
        messages = []
        while rest:
            if rest[0] != start or message not in rest:
                return Malformed("half_message")
            at = rest.index(message)
            header = rest[1:at]
            if self._segments.spells_control(header):
                return Malformed("spelled_control")
            words = "".join(segment if isinstance(segment, str) else in_header.get(segment, "\0") for segment in header)
            found = _HEADER.fullmatch(words)
            if not found:
                return Malformed("half_message")
            body = rest[at + 1 : rest.index(end, at)]
            if len(body) > 1 or any(isinstance(segment, int) for segment in body):
                return Malformed("control_inside")
            if found["to"] and found["to_late"] not in (None, found["to"]):
                return Malformed("wrong_recipient")
            messages.append((found["to"] or found["to_late"], found["channel"], "".join(map(str, body))))
            rest = rest[at + 2 + len(body) :]
        return messages

    def _recipient(self, turn: Sequence[int]) -> str | None:
        """Whom the last message of a turn addresses, be its text a call or not; `UNKNOWN` for no turn."""
        if not turn:
            return UNKNOWN
        segments = self._segments.read_turn(turn, (self.stop_id,))
        messages = segments if isinstance(segments, Malformed) else self._messages(segments)
        return None if isinstance(messages, Malformed) else messages[-1][0]

    def _tool_message(self, recipient: str, text: str) -> list[int]:
        written = json.dumps(text, ensure_ascii=False)
        after = Markup(" to=assistant<|channel|>commentary<|message|>")
        return self._segments.write(Markup("<|start|>"), recipient, after, written, Markup("<|end|>"), OPENING)


def _question_words(question: str) -> list[str]:
    return [Markup("<|start|>user<|message|>"), question, Markup("<|end|>"), OPENING]


def _namespace(tools: Sequence[Tool]) -> str:
    """The tools as TypeScript, as the template writes it."""
    types = []
    for tool in tools:
        fields = "".join(f"// {p.description}\n{p.name}: {_TYPES[p.kind]},\n" for p in tool.parameters)
        arguments = f"(_: {{\n{fields}}})" if fields else "()"
        types.append(f"// {tool.description}\ntype {tool.name} = {arguments} => any;\n\n")
    return f"namespace functions {{\n\n{''.join(types)}}} // namespace functions"
