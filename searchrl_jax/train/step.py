"""One update from micro-batches: gradients are summed, and divided once, last."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params, forward, unembed
from searchrl_jax.ops.sampling import processed_log_probs
from searchrl_jax.rl.aggregate import aggregate
from searchrl_jax.rl.diagnostics import diagnostics
from searchrl_jax.rl.losses import LOSSES
from searchrl_jax.rollout.batch import Rows
from searchrl_jax.train.state import TrainState

Metrics = dict[str, Array]


@dataclass(frozen=True)
class LossSpec:
    """What is minimised over the action tokens.

    Attributes:
        name: a policy-gradient loss of `rl.losses.LOSSES`, or "cross_entropy" for behaviour cloning.
        temperature, top_p: of the sampler, so that the learner's log-probability is of the distribution sampled.
        entropy_coef: times the entropy (nats) of each action token is taken off its loss; below 0 it sharpens.
    """

    name: str
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    temperature: float = 1.0
    top_p: float = 1.0
    entropy_coef: float = 0.0


def action_log_probs(
    config: DecoderConfig, params: Params, rows: Rows, *, temperature: float, top_p: float
) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
    """Log-probability of each action token given all before it, and the entropy (nats) of its distribution."""
    hidden = forward(config, params, rows.token_ids, rows.positions, rows.segment_ids)
    predicting = jnp.take_along_axis(hidden, rows.target[..., None] - 1, axis=1)
    logits = unembed(config, params, predicting)
    token = jnp.take_along_axis(rows.token_ids, rows.target, axis=1)
    log_probs = processed_log_probs(logits, temperature=temperature, top_p=top_p, keep=token)
    entropy = -jnp.sum(jnp.where(jnp.isfinite(log_probs), jnp.exp(log_probs) * log_probs, 0.0), axis=-1)
    return jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0], entropy


def loss_sums(config: DecoderConfig, spec: LossSpec, params: Params, rows: Rows) -> tuple[Float[Array, ""], Metrics]:
    """Sum of the loss over the action tokens of a micro-batch (not divided), and sums for the metrics."""
    logprob, entropy = action_log_probs(config, params, rows, temperature=spec.temperature, top_p=spec.top_p)
    if spec.name == "cross_entropy":
        per_token = jnp.where(rows.is_action, -logprob, 0.0)
    else:
        per_token = LOSSES[spec.name](
            logprob,
            rows.behavior_logprob,
            rows.advantage,
            rows.is_action,
            clip_low_threshold=spec.clip_low_threshold,
            clip_high_threshold=spec.clip_high_threshold,
        )
    if spec.entropy_coef:
        per_token = per_token - spec.entropy_coef * jnp.where(rows.is_action, entropy, 0.0)
    total, count = aggregate(per_token, rows.is_action, "token_mean")
    found = diagnostics(
        logprob,
        rows.behavior_logprob,
        rows.is_action,
        clip_low_threshold=spec.clip_low_threshold,
        clip_high_threshold=spec.clip_high_threshold,
    )
    metrics = {
        "loss": total,
        "tokens": count,
        "entropy": aggregate(entropy, rows.is_action, "token_mean")[0],
        "ratio_mean": found.ratio_mean[0],
        "clipped_share": found.clipped_share[0],
        "approx_kl": found.approx_kl[0],
        "ratio_max": found.ratio_max,
    }
    return total, jax.tree.map(jax.lax.stop_gradient, metrics)


def make_update(
    config: DecoderConfig,
    spec: LossSpec,
    optimizer: optax.GradientTransformation,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Sequence[Rows]], tuple[TrainState, dict[str, float]]]:
    """A function that takes one optimizer step on a list of micro-batches, and says what it saw.

    The gradient is that of the mean over all action tokens of the list, whatever its split:

        sum over micro-batches of d(sum of token losses) / sum over micro-batches of action tokens

    Args:
        shardings: a NamedSharding in the place of each array of the state, where it stays; or each placement that XLA
            chooses for a result is compiled for anew. None leaves it to XLA.
    """

    @functools.partial(
        jax.jit, donate_argnums=(1,), out_shardings=None if shardings is None else (shardings.params, None)
    )
    def accumulate(params: Params, sums: tuple[Params, Metrics], rows: Rows) -> tuple[Params, Metrics]:
        (_, metrics), grads = jax.value_and_grad(functools.partial(loss_sums, config, spec), has_aux=True)(params, rows)
        grad_sum, metric_sum = sums
        peak = jnp.maximum(metric_sum["ratio_max"], metrics["ratio_max"])
        added = jax.tree.map(jnp.add, (grad_sum, metric_sum), (grads, metrics))
        return added[0], added[1] | {"ratio_max": peak}

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))
    def apply(state: TrainState, sums: tuple[Params, Metrics]) -> tuple[TrainState, Metrics]:
        grad_sum, metrics = sums
        count = jnp.maximum(metrics["tokens"], 1)
        grads = jax.tree.map(lambda g: g / count, grad_sum)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        means = {name: metrics[name] / count for name in metrics if name not in ("tokens", "ratio_max")}
        means |= {"ratio_max": metrics["ratio_max"], "grad_norm": optax.tree.norm(grads), "tokens": metrics["tokens"]}
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.updates + 1), means

    def update(state: TrainState, micro_batches: Sequence[Rows]) -> tuple[TrainState, dict[str, float]]:
        if not micro_batches:
            raise ValueError("expected at least one micro-batch, got none; skip the update and count it")
        if not any(np.any(rows.is_action) for rows in micro_batches):
            # Adam would move the weights all the same, by its running mean.
            raise ValueError("expected at least one action token, got none; skip the update and count it")
        zeros: Any = (jax.tree.map(jnp.zeros_like, state.params), _no_metrics())
        for rows in micro_batches:
            zeros = accumulate(state.params, zeros, rows)
        state, means = apply(state, zeros)
        return state, {name: float(value) for name, value in means.items()}

    return update


def _no_metrics() -> Metrics:
    names = ("loss", "tokens", "entropy", "ratio_mean", "clipped_share", "approx_kl", "ratio_max")
    return {name: jnp.zeros(()) for name in names}
