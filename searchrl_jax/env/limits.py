"""The limits of an episode."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Past any of these the episode ends without a submission.

    Attributes:
        max_turns: turns of the policy, the submission among them; malformed turns count.
        max_tokens_per_turn: sampled tokens of one turn, its end of turn included.
        max_tokens_per_episode: tokens of prompt, turns and observations together.
    """

    max_turns: int = 6
    max_tokens_per_turn: int = 128
    max_tokens_per_episode: int = 2048

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"expected {field.name} to be an integer >= 1, got {value!r}; give a positive limit")
