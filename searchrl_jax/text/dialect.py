"""What rollouts, demonstrations and the environment ask of a dialect, and the choice of one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from searchrl_jax.text.calls import Call, Malformed
from searchrl_jax.text.gemma4 import Gemma4Dialect
from searchrl_jax.text.harmony import HarmonyDialect
from searchrl_jax.text.hermes import HermesDialect
from searchrl_jax.text.plain import PlainDialect
from searchrl_jax.text.pretrained import PretrainedTokenizer
from searchrl_jax.text.qwen3 import Qwen3Dialect
from searchrl_jax.text.qwen3_6 import Qwen36Dialect
from searchrl_jax.text.tokenizer import Tokenizer
from searchrl_jax.text.tools import Tool


class Dialect(Protocol):
    """Turns and calls as ids, append only: a history is its prompt, then sampled ids and observations in turn."""

    stop_id: int
    """Of the token that ends a call."""

    stop_ids: tuple[int, ...]
    """Of all tokens that end a turn, `stop_id` first."""

    @property
    def tokenizer(self) -> Tokenizer | PretrainedTokenizer:
        """Whose ids these are."""

    @property
    def observation_overhead(self) -> int:
        """Ids that `render_observation` adds to those of the text itself."""

    def render_prompt(self, question: str, system: str | None = None) -> list[int]:
        """All ids before the first action."""

    def render_observation(self, text: str, turn: Sequence[int] = ()) -> list[int]:
        """Ids to append to the sampled ids `turn`; a dialect that names tools in answers finds the name there."""

    def render_call(self, call: Call) -> list[int]:
        """The ids of one action, as a demonstration holds them."""

    def parse(self, ids: Sequence[int]) -> Call | Malformed:
        """Reads the sampled ids of one turn."""


PRETRAINED: Mapping[str, Callable[[PretrainedTokenizer, Sequence[Tool]], Dialect]] = {
    "qwen3": Qwen3Dialect,
    "qwen3_6": Qwen36Dialect,
    "harmony": HarmonyDialect,
    "gemma4": Gemma4Dialect,
    "plain": PlainDialect,
}


def build_dialect(name: str, tokenizer: Tokenizer | PretrainedTokenizer, tools: Sequence[Tool] = ()) -> Dialect:
    """The dialect `name`: "hermes" for models trained here, or one of `PRETRAINED`.

    Args:
        tools: that the prompt tells of; a model trained here has learnt its tools.

    Raises:
        ValueError: there is no such dialect, or the tokenizer is of another family.
    """
    if name == "hermes" and isinstance(tokenizer, Tokenizer):
        return HermesDialect(tokenizer)
    if name not in PRETRAINED and name != "hermes":
        raise ValueError(f"expected a dialect out of {', '.join(('hermes', *PRETRAINED))}, got {name!r}; choose one")
    if name == "hermes" or isinstance(tokenizer, Tokenizer):
        raise ValueError(
            f"expected the tokenizer of {'a model trained here' if name == 'hermes' else 'a pretrained model'} for the "
            f"dialect {name}, got {type(tokenizer).__name__}; choose the dialect of its family"
        )
    return PRETRAINED[name](tokenizer, tools)
