"""The configuration of a decoder that came out of a checkpoint."""

import dataclasses
from dataclasses import dataclass, field

from searchrl_jax.models.config import DecoderConfig


@dataclass(frozen=True)
class PretrainedConfig(DecoderConfig):
    """A decoder's configuration, and where it was loaded from.

    Args:
        source: the folder or file. What came with the weights there (tokenizer, chat template, the towers of other
            senses) is carried over when the model is saved. Two configurations that differ in it alone are equal.
    """

    source: str = field(default="", compare=False)


def pretrained_config(config: DecoderConfig, source: str) -> PretrainedConfig:
    """`config` with its source."""
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(DecoderConfig)}
    return PretrainedConfig(**fields, source=source)
