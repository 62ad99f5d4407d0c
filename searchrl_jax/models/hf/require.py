"""Refusals of what a configuration may ask for and the decoder doesn't compute."""

from collections.abc import Mapping
from typing import Any


def require(config: Mapping[str, Any], **only: Any) -> None:
    """Nothing, if each field named here is absent, null, or of its only value.

    Raises:
        ValueError: one has another value. Computing without it would give other logits, in silence.
    """
    for name, value in only.items():
        if config.get(name) not in (None, value):
            raise ValueError(
                f"config.json: expected {name} {value!r}, got {config[name]!r}; this decoder computes nothing else"
            )
