"""The layers of a configuration as the period that they repeat."""

from collections.abc import Mapping, Sequence

from searchrl_jax.models.config import Layer


def pattern_of(names: Sequence[str], kinds: Mapping[str, Layer]) -> tuple[Layer, ...]:
    """The shortest period that `names` (`layer_types`) are whole repetitions of.

    Args:
        kinds: the layer of each name.

    Raises:
        ValueError: a name isn't known here.
    """
    if unknown := sorted(set(names) - kinds.keys()):
        raise ValueError(f"config.json: expected layer_types of {', '.join(kinds)}, got {', '.join(unknown)}")
    size = next(n for n in range(1, len(names) + 1) if list(names[:n]) * (len(names) // n) == list(names))
    return tuple(kinds[name] for name in names[:size])
