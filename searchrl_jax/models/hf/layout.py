"""How our arrays are stored in a checkpoint. A layout goes both ways; all but one only move elements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How one array or several (of one layer, if layers are stacked) are stored as one tensor.

    Args:
        theirs: the tensor, of our arrays; of numpy's and of tracers.
        ours: our arrays, of the tensor and their shapes.
        is_exact: false where what is read is rounded, and kept in float32 for that. What wasn't changed since is then
            saved with the bits that its source has.
    """

    theirs: Callable[..., Any]
    ours: Callable[..., tuple[Any, ...]]
    is_exact: bool = True


def _matrix(x: Any) -> Any:
    return x.reshape(x.shape[0], -1).T


def _rows(x: Any, *shapes: Shape) -> tuple[Any, ...]:
    ends = np.cumsum([np.prod(shape[1:]) for shape in shapes])[:-1]
    return tuple(part.T.reshape(shape) for part, shape in zip(np.split(x, ends), shapes, strict=True))


def _heads(x: Any, *shapes: Shape) -> tuple[Any, ...]:
    inside, heads, _ = shapes[0]
    both = x.T.reshape(inside, heads, -1)
    return tuple(np.split(both, [shapes[0][-1]], axis=-1))


SAME = Layout(lambda x: x, lambda x, shape: (x,))
# [N, H] is stored as [N * H], a number as [1].
FLAT = Layout(lambda x: x.reshape(-1), lambda x, shape: (x.reshape(shape),))
# [in, *out] is stored as [out, in], as torch's linear layers have it.
LINEAR = Layout(_matrix, lambda x, shape: (x.T.reshape(shape),))
# Several [in, *out], one after the other in the rows of one such matrix.
STACKED = Layout(lambda *parts: jnp.concatenate([_matrix(x) for x in parts]), _rows)
# Two [in, N, H], one after the other in the rows of each head.
STACKED_BY_HEAD = Layout(lambda x, y: _matrix(jnp.concatenate([x, y], axis=-1)), _heads)
# Two [..., F] are stored as [..., 2 F], their elements in turn.
INTERLEAVED = Layout(
    lambda x, y: jnp.stack([x, y], axis=-1).reshape(*x.shape[:-1], -1),
    lambda x, *shapes: (x[..., ::2], x[..., 1::2]),
)
# [W, channels], tap j for the token j back, is stored as torch's depthwise convolution: [channels, 1, W], oldest first.
TAPS = Layout(lambda x: x[::-1].T[:, None], lambda x, shape: (x[:, 0].T[::-1],))
# What a norm multiplies by is stored less 1.
LESS_ONE = Layout(lambda x: x - 1, lambda x, shape: (x.astype(np.float32) + 1,), is_exact=False)
