"""Sampling from logits, and the log-probability under the very distribution that was sampled."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def processed_log_probs(
    logits: Float[Array, "... V"], *, temperature: float, top_p: float, keep: Int[Array, "..."] | None = None
) -> Float[Array, "... V"]:
    """Log-probabilities after temperature and nucleus truncation; -inf outside the nucleus.

        log softmax(logits / temperature), renormalised over the smallest set of tokens whose mass reaches top_p

    Args:
        temperature: >= 0. At 0 decoding is greedy, and the log-probability is that of temperature 1, for
            information: the distribution sampled is a point mass.
        top_p: in (0, 1]; 1 keeps all tokens.
        keep: a token per row that stays in the nucleus even if rounding puts it just outside, so that a learner's
            log-probability of a sampled token is always finite.

    Source:
        Holtzman et al. 2020, arXiv:1904.09751, section 3.1 (nucleus sampling).
    """
    scaled = logits.astype(jnp.float32) / (temperature if temperature > 0 else 1.0)
    log_probs = jax.nn.log_softmax(scaled, axis=-1)
    if top_p >= 1:
        return log_probs
    descending = jnp.sort(log_probs, axis=-1)[..., ::-1]
    mass_before = jnp.cumsum(jnp.exp(descending), axis=-1) - jnp.exp(descending)
    # The first token is always inside, since nothing comes before it.
    threshold = jnp.min(jnp.where(mass_before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
    inside = log_probs >= threshold
    if keep is not None:
        inside = inside | (jnp.arange(logits.shape[-1]) == keep[..., None])
    return jax.nn.log_softmax(jnp.where(inside, log_probs, -jnp.inf), axis=-1)


def invert_cumulative(log_probs: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first token of positive mass whose cumulative mass exceeds uniform * total, for `uniform` in [0, 1).

    A sum in parallel rounds each prefix its own way, so that the cumulative mass may rise by 1e-7 at a token of no
    mass: with a nucleus, about one draw in two million would leave it. Hence the mask.
    """
    mass = jnp.exp(log_probs)
    cumulative = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0.0)
    total = jnp.max(cumulative, axis=-1)
    return jnp.argmax(cumulative > (uniform * total)[:, None], axis=-1).astype(jnp.int32)


def sample(
    keys: Key[Array, " B"], logits: Float[Array, "B V"], *, temperature: float, top_p: float
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token per row, and its log-probability under the distribution that it was drawn from.

    The draw inverts the cumulative distribution with one uniform number per row, so none outside the nucleus is ever
    drawn. The most likely token is taken at temperature 0.
    """
    log_probs = processed_log_probs(logits, temperature=temperature, top_p=top_p)
    if temperature > 0:
        token = invert_cumulative(log_probs, jax.vmap(lambda key: jax.random.uniform(key))(keys))
    else:
        token = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
    return token, jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
