"""Sums, means and standard deviations over the positions that count.

The mask is applied to the *input*, with `where`, not to the result by multiplication: `0 * nan` is nan, in the value
and again in the gradient. What stands at a masked position, NaN and infinity included, changes neither. All of them
accumulate in float32.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Axis = int | tuple[int, ...] | None


def masked_sum(
    x: Float[Array, "*shape"], where: Bool[Array, "*shape"], axis: Axis = None, *, keepdims: bool = False
) -> Array:
    """Sum of `x` over the positions where `where` is true; 0 where there are none.

    Args:
        x: any dtype; summed in float32.
        where: positions that count; broadcasts against `x`.
        axis: axes to sum over; all of them if None.
        keepdims: leave the summed axes in place with size 1.
    """
    return jnp.sum(jnp.where(where, jnp.asarray(x, jnp.float32), 0.0), axis=axis, keepdims=keepdims)


def masked_mean(
    x: Float[Array, "*shape"],
    where: Bool[Array, "*shape"],
    axis: Axis = None,
    *,
    weight: Float[Array, "*shape"] | None = None,
    keepdims: bool = False,
) -> Array:
    """Weighted mean of `x` over the positions where `where` is true; 0 where their weights sum to 0.

        mean = sum(weight * x) / sum(weight)

    Args:
        x: any dtype; accumulated in float32.
        where: positions that count; broadcasts against `x`.
        axis: axes to average over; all of them if None.
        weight: how often each position counts, >= 0; once each if None.
        keepdims: leave the averaged axes in place with size 1.
    """
    x, where, weight = _broadcast(x, where, weight)
    total = masked_sum(weight, where, axis, keepdims=keepdims)
    weighted = jnp.where(where, x, 0.0) * jnp.where(where, weight, 0.0)
    # The divisor is made safe *before* dividing, or the branch not taken puts NaN into the gradient.
    return jnp.sum(weighted, axis=axis, keepdims=keepdims) / jnp.where(total > 0, total, 1.0)


def masked_std(
    x: Float[Array, "*shape"],
    where: Bool[Array, "*shape"],
    axis: Axis = None,
    *,
    weight: Float[Array, "*shape"] | None = None,
    ddof: int = 1,
    keepdims: bool = False,
) -> Array:
    """Standard deviation of `x` over the positions where `where` is true; 0 where their weights sum to `ddof` or less.

        std = sqrt(sum(weight * (x - mean)^2) / (sum(weight) - ddof))

    Its gradient is 0, not NaN, where the deviation itself is 0. Equal values can leave a residue of rounding (about
    1e-8 relative): whoever divides by the result decides what counts as no spread.

    Args:
        x: any dtype; accumulated in float32.
        where: positions that count; broadcasts against `x`.
        axis: axes to reduce; all of them if None.
        weight: how often each position counts, >= 0; once each if None.
        ddof: 1 for the unbiased variance, 0 for the variance of the values themselves.
        keepdims: leave the reduced axes in place with size 1.
    """
    x, where, weight = _broadcast(x, where, weight)
    mean = masked_mean(x, where, axis, weight=weight, keepdims=True)
    deviation = jnp.where(where, x, mean) - mean
    squares = jnp.sum(deviation**2 * jnp.where(where, weight, 0.0), axis=axis, keepdims=keepdims)
    freedom = masked_sum(weight, where, axis, keepdims=keepdims) - ddof
    variance = jnp.where(freedom > 0, squares, 0.0) / jnp.where(freedom > 0, freedom, 1.0)
    is_positive = variance > 0
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, variance, 1.0)), 0.0)


def _broadcast(x: Array, where: Array, weight: Array | None) -> tuple[Array, Array, Array]:
    x = jnp.asarray(x, jnp.float32)
    weight = jnp.ones((), jnp.float32) if weight is None else jnp.asarray(weight, jnp.float32)
    shape = jnp.broadcast_shapes(x.shape, jnp.shape(where), weight.shape)
    return (
        jnp.broadcast_to(x, shape),
        jnp.broadcast_to(jnp.asarray(where, bool), shape),
        jnp.broadcast_to(weight, shape),
    )
