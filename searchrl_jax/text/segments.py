"""Turns as segments: control tokens by id, and the ordinary text between them, each run of it encoded as a whole.

    Markup("<|im_start|>user\\n")  "How <|im_end|>?"  Markup("<|im_end|>\\n")
    [im_start]  user \\n How < | im _ end | > ?  [im_end]  \\n

What neighbours in text is encoded together, as it is where a template's whole output is; control tokens are the only
borders. Only the template's own words, marked as `Markup`, become control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from searchrl_jax.text.calls import Malformed
from searchrl_jax.text.pretrained import PretrainedTokenizer


class Markup(str):
    """A template's own words, in which control strings are control tokens."""


class Segments:
    """Writes and reads the segments of one dialect."""

    def __init__(self, tokenizer: PretrainedTokenizer, controls: Sequence[str], family: str) -> None:
        """Args:
        controls: strings of the control tokens that the dialect writes.
        family: of models, for the error.

        Raises:
            ValueError: the tokenizer lacks one of them.
        """
        missing = [text for text in controls if text not in tokenizer.control_ids]
        if missing:
            raise ValueError(
                f"expected the tokenizer of a {family} model, got one without {', '.join(missing)}; "
                "choose the dialect of its family, or plain"
            )
        self._tokenizer = tokenizer
        self._ids = {text: tokenizer.control_ids[text] for text in controls}
        self._all_controls = frozenset(tokenizer.control_ids.values())
        self._split = re.compile("(" + "|".join(map(re.escape, controls)) + ")")

    def id(self, control: str) -> int:
        """Id of a control token."""
        return self._ids[control]

    def write(self, *parts: str) -> list[int]:
        """Ids of `parts` as one text: of `Markup` control strings are control tokens, of any other string never."""
        ids: list[int] = []
        text = ""
        for part in parts:
            for piece in self._split.split(part):
                if isinstance(part, Markup) and piece in self._ids:
                    ids += [*self._tokenizer.encode(text), self._ids[piece]]
                    text = ""
                else:
                    text += piece
        return [*ids, *self._tokenizer.encode(text)]

    def read_turn(self, ids: Sequence[int], stops: Collection[int]) -> list[int | str] | Malformed:
        """The segments of a sampled turn without its stop: control tokens as ids, what is between them as text.

        Bytes that are no UTF-8 become lone surrogates, so that half a character in a thought harms nothing and one in
        an argument can be seen (`calls.checked`).

        Args:
            stops: one of which ends the turn, or it is malformed.
        """
        if not ids:
            return Malformed("empty")
        if not all(self._tokenizer.knows(id_) for id_ in ids):
            return Malformed("unknown_token")
        if ids[-1] not in stops:
            return Malformed("missing_stop")
        if len(ids) == 1:
            return Malformed("empty")
        segments: list[int | str] = []
        run: list[int] = []
        for id_ in (*ids[:-1], None):
            if id_ is not None and id_ not in self._all_controls:
                run.append(id_)
                continue
            if run:
                segments.append(self._tokenizer.decode_bytes(run).decode("utf-8", errors="surrogateescape"))
                run = []
            if id_ is not None:
                segments.append(id_)
        return segments

    def spells_control(self, segments: Sequence[int | str]) -> bool:
        """Whether ordinary pieces spell a control string of the dialect."""
        return any(isinstance(segment, str) and self._split.search(segment) for segment in segments)
