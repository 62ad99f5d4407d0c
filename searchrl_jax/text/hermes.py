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
from collections.abc import Sequence

from searchrl_jax.text.calls import CLOSING_SCAFFOLDS, Call, Malformed, read_call, require_read_back, write_json
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
        f"{json.dumps(key, ensure_ascii=False)}: {write_json(value, call, (',', ':'))}"
        for key, value in call.arguments.items()
    )
    text = f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {{{arguments}}}}}'
    require_read_back(call, read_call(text, CONTROL_TOKENS))
    return text


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
    return read_call(body, CONTROL_TOKENS)


class HermesDialect:
    """Renders and parses turns as ids of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        control, header = tokenizer.control_ids, tokenizer.header_ids
        self.tokenizer = tokenizer
        self.stop_id: int = control[TURN_END]
        self.stop_ids: tuple[int, ...] = (self.stop_id,)
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

    def render_observation(self, text: str, turn: Sequence[int] = ()) -> list[int]:
        """Ids to append to a turn that ended with `stop_id`: the tool's turn, and the next assistant turn's opening.

        Args:
            turn: the sampled ids; all are answered alike here.
        """
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
        return read_call(text, CONTROL_TOKENS)


def _runs_without(ids: Sequence[int], reserved: frozenset[int]) -> list[list[int]]:
    """The maximal runs of ordinary ids."""
    runs: list[list[int]] = [[]]
    for id_ in ids:
        if id_ in reserved:
            runs.append([])
        else:
            runs[-1].append(id_)
    return runs
