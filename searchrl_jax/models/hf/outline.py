"""What a config.json promises: the decoder, the shapes of its parameters, and the tensors that they are stored as."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import init_params
from searchrl_jax.models.hf.families import complete, family_of, table_of
from searchrl_jax.models.hf.table import Row, rows_of

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Outline:
    """A model without its weights. Shapes are of our parameters, by path; `carried` begins what isn't read."""

    decoder: DecoderConfig
    shapes: Shapes
    rows: list[Row]
    carried: tuple[str, ...]


def outline(config: Mapping[str, Any]) -> Outline:
    """The outline of a checkpoint with this config.json.

    Raises:
        ValueError: its family, or something that it asks for, isn't known here.
    """
    family = family_of(config)
    try:
        filled = complete(config)
        decoder = family.decoder_config(filled)
        shapes = parameter_shapes(decoder)
        return Outline(decoder, shapes, rows_of(table_of(filled), shapes, decoder.pattern), family.carried)
    except ValueError:
        raise
    except Exception as error:  # transformers has kinds of its own for a field of another type
        raise ValueError(
            f"config.json: expected what describes a model of the family {config['model_type']}, but "
            f"{type(error).__name__}: {error}; take the file that came with the weights"
        ) from error


def parameter_shapes(config: DecoderConfig) -> Shapes:
    """Shapes of a decoder's parameters by path, as the decoder itself makes them."""
    made = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    return {path: each.shape for path, each in flatten_dict(made, sep="/").items()}
