"""One update from micro-batches: gradients are summed, and divided once, last."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from searchrl_jax.core.fair_lock import FairLock
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params, forward, unembed
from searchrl_jax.models.lora import attach
from searchrl_jax.models.value import estimate
from searchrl_jax.ops.sampling import processed_log_probs
from searchrl_jax.parallel.rules import replicated, spread
from searchrl_jax.rl.aggregate import aggregate
from searchrl_jax.rl.diagnostics import BINS_PER_SIDE, diagnostics, ratio_counts, ratio_quantile
from searchrl_jax.rl.losses import DEFAULT_BOUNDS, LOSSES, value_loss
from searchrl_jax.rl.ratios import k3, reference_penalty
from searchrl_jax.rollout.batch import Rows
from searchrl_jax.train.state import Critic, TrainState

Metrics = dict[str, Array]

# Logits of one row that are made at once: 0.5 GiB. A row of more action tokens is computed piece by piece, and again in
# the backward pass.
LOGITS_AT_ONCE = 2**27

# Means over the loss's own denominator; all others are means over action tokens.
OF_THE_LOSS = ("loss", "value_loss")


@dataclass(frozen=True)
class LossSpec:
    """What is minimised over the action tokens.

        policy loss (name) + kl_coef * divergence from the reference - entropy_coef * entropy    [+ value loss]

    Attributes:
        name: a policy-gradient loss of `rl.losses.LOSSES`, or "cross_entropy" for behaviour cloning.
        clip_low_threshold, clip_high_threshold: None for the loss's own.
        dual_clip: for ppo; None for none.
        aggregation: one of `rl.aggregate.AGGREGATIONS`, for all parts of the loss.
        normalizer: tokens per trajectory, for the aggregation "constant" alone.
        temperature, top_p: of the sampler, so that the learner's log-probability is of the distribution sampled.
        has_reference: whether rows hold `reference_logprob`.
        kl_coef, kl_estimator: of `rl.ratios.reference_penalty`.
        entropy_coef: times the entropy (nats) of each action token is taken off its loss; below 0 it sharpens.
        value_clip: of `rl.losses.value_loss`.
        value_trunk_coef: share of the value loss's gradient that reaches the decoder.
    """

    name: str
    clip_low_threshold: float | None = None
    clip_high_threshold: float | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    dual_clip: float | None = None
    aggregation: str = "token_mean"
    normalizer: float | None = None
    has_reference: bool = False
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    value_clip: float | None = None
    value_trunk_coef: float = 0.0

    @property
    def bounds(self) -> dict[str, float]:
        """The clip thresholds, as the functions of `rl` take them."""
        low, high = DEFAULT_BOUNDS.get(self.name, DEFAULT_BOUNDS["ppo"])
        return {
            "clip_low_threshold": low if self.clip_low_threshold is None else self.clip_low_threshold,
            "clip_high_threshold": high if self.clip_high_threshold is None else self.clip_high_threshold,
        }


def action_log_probs(
    config: DecoderConfig, params: Params, rows: Rows, *, temperature: float, top_p: float
) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
    """Log-probability of each action token given all before it, and the entropy (nats) of its distribution."""
    return _log_probs(config, params, _predicting(config, params, rows), rows, temperature, top_p)


def _predicting(
    config: DecoderConfig, params: Params, rows: Rows, *, remat: bool = False, mesh: Mesh | None = None
) -> Float[Array, "B A D"]:
    """The hidden state before each action token: of all that the policy knew when it chose."""
    hidden = forward(config, params, rows.token_ids, rows.positions, rows.segment_ids, remat=remat, mesh=mesh)
    hidden = spread(hidden, mesh, ("rows", None, None))
    return jnp.take_along_axis(hidden, rows.target[..., None] - 1, axis=1)


def _log_probs(
    config: DecoderConfig,
    params: Params,
    predicting: Float[Array, "B A D"],
    rows: Rows,
    temperature: float,
    top_p: float,
) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
    def of(predicting: Float[Array, "B a D"], token: Int[Array, "B a"]) -> tuple[Array, Array]:
        logits = unembed(config, params, predicting)
        log_probs = processed_log_probs(logits, temperature=temperature, top_p=top_p, keep=token)
        return jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0], entropy_of(log_probs)

    token = jnp.take_along_axis(rows.token_ids, rows.target, axis=1)
    A, piece = token.shape[1], max(LOGITS_AT_ONCE // config.vocab_size, 1)
    if piece >= A:
        return of(predicting, token)
    padding = [(0, 0), (0, -A % piece)]
    pieces = (jnp.pad(predicting, [*padding, (0, 0)]), jnp.pad(token, padding))
    pieces = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, piece, *x.shape[2:]), 1, 0), pieces)
    found = jax.lax.map(jax.checkpoint(lambda each: of(*each)), pieces)
    logprob, entropy = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :A] for x in found)
    return logprob, entropy


def entropy_of(log_probs: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """-sum p log p (nats) over the last axis; what has no probability adds nothing."""
    # Masked before the product: outside the nucleus exp(-inf) * -inf would put NaN into the gradient.
    finite = jnp.where(jnp.isfinite(log_probs), log_probs, 0.0)
    return -jnp.sum(jnp.where(jnp.isfinite(log_probs), jnp.exp(finite) * finite, 0.0), axis=-1)


def loss_sums(
    config: DecoderConfig,
    spec: LossSpec,
    params: Params,
    rows: Rows,
    value_params: Params | None = None,
    *,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Sum of the loss over the action tokens of a micro-batch (not divided), and sums for the metrics.

    Args:
        value_params: of the value model; its loss is then part of the sum.
        remat: compute each block's activations again in the backward pass in place of keeping them.
        mesh: that the rows lie on; None for one device.
    """
    predicting = _predicting(config, params, rows, remat=remat, mesh=mesh)
    logprob, entropy = _log_probs(config, params, predicting, rows, spec.temperature, spec.top_p)
    if spec.name == "cross_entropy":
        per_token = jnp.where(rows.is_action, -logprob, 0.0)
    else:
        options = {} if spec.dual_clip is None else {"dual_clip": spec.dual_clip}
        per_token = LOSSES[spec.name](
            logprob, rows.proximal_logprob, rows.advantage, rows.is_action, **spec.bounds, **options
        )
    if spec.kl_coef:
        per_token += spec.kl_coef * reference_penalty(
            logprob, rows.reference_logprob, rows.behavior_logprob, rows.is_action, estimator=spec.kl_estimator
        )
    if spec.entropy_coef:
        per_token -= spec.entropy_coef * jnp.where(rows.is_action, entropy, 0.0)
    of_the_loss = functools.partial(
        aggregate,
        is_action=rows.is_action,
        how=spec.aggregation,
        trajectory_tokens=rows.trajectory_tokens,
        normalizer=spec.normalizer,
    )
    total, denominator = of_the_loss(per_token)
    of_tokens = functools.partial(aggregate, is_action=rows.is_action, how="token_mean")
    found = diagnostics(logprob, rows.proximal_logprob, rows.is_action, **spec.bounds)
    behavior_kl = k3(rows.behavior_logprob, logprob, rows.is_action)
    metrics = {
        "loss": total,
        "denominator": denominator,
        "tokens": of_tokens(jnp.ones_like(logprob))[1],
        "entropy": of_tokens(entropy)[0],
        "ratio_mean": found.ratio_mean[0],
        "clipped_share": found.clipped_share[0],
        "approx_kl": of_tokens(behavior_kl)[0],
        "ratio_max": found.ratio_max,
        "ratio_counts": ratio_counts(logprob, rows.proximal_logprob, rows.is_action),
    }
    if spec.has_reference:
        metrics["reference_kl"] = of_tokens(k3(logprob, rows.reference_logprob, rows.is_action))[0]
    if value_params is not None:
        value = estimate(value_params, _scaled_gradient(predicting, spec.value_trunk_coef))
        errors = value_loss(value, rows.value, rows.value_target, rows.is_action, clip=spec.value_clip)
        metrics["value_loss"] = of_the_loss(errors)[0]
        total = total + metrics["value_loss"]
    return total, jax.tree.map(jax.lax.stop_gradient, metrics)


def _scaled_gradient(x: Float[Array, "... D"], scale: float) -> Float[Array, "... D"]:
    """x, with `scale` times its gradient."""
    constant = jax.lax.stop_gradient(x)
    return constant if scale == 0 else constant + scale * (x - constant)


def make_score(
    config: DecoderConfig, spec: LossSpec, mesh: Mesh | None = None
) -> Callable[[Params, Params | None, Rows], tuple[Float[Array, "B A"], Float[Array, "B A"]]]:
    """A function of (parameters, the value model's or None, rows): log-probability of each action token, and the value
    before it (0 without a value model)."""

    @jax.jit
    def score(params: Params, value_params: Params | None, rows: Rows) -> tuple[Array, Array]:
        predicting = _predicting(config, params, rows, mesh=mesh)
        logprob, _ = _log_probs(config, params, predicting, rows, spec.temperature, spec.top_p)
        value = jnp.zeros_like(logprob) if value_params is None else estimate(value_params, predicting)
        return logprob, value

    return score


class Programs(NamedTuple):
    """The compiled parts of an update, as `jax.jit` gives them.

    Attributes:
        accumulate: (weights, sums, rows, base) -> sums with those of one micro-batch added; see `no_sums`.
        apply: (state, sums, *, policy_frozen) -> the state after the optimizer's step, and means for the metrics.
        sum_shardings: where the sums lie: of all gradients, and of all metrics; None for wherever they happen to.
    """

    accumulate: Any
    apply: Any
    sum_shardings: Any


def make_programs(
    config: DecoderConfig,
    spec: LossSpec,
    optimizer: optax.GradientTransformation,
    shardings: TrainState | None = None,
    *,
    value_optimizer: optax.GradientTransformation | None = None,
    remat: bool = False,
    adapter_scale: float = 1.0,
) -> Programs:
    """The parts of `make_update`, with its arguments, for whoever compiles them ahead of time."""
    mesh: Mesh | None = None if shardings is None else jax.tree.leaves(shardings)[0].mesh
    # Sums stay where the first of them lay, or the second micro-batch would be compiled for anew.
    sum_shardings = None if shardings is None or mesh is None else (weights_of(shardings), replicated(mesh))

    @functools.partial(jax.jit, donate_argnums=(1,), out_shardings=sum_shardings)
    def accumulate(weights: Any, sums: tuple[Any, Metrics], rows: Rows, base: Params | None) -> tuple[Any, Metrics]:
        def loss(weights: Any) -> tuple[Array, Metrics]:
            params = weights[0] if base is None else attach(base, weights[0], adapter_scale)
            return loss_sums(config, spec, params, rows, weights[1], remat=remat, mesh=mesh)

        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        grad_sum, metric_sum = sums
        peak = jnp.maximum(metric_sum["ratio_max"], metrics["ratio_max"])
        added = jax.tree.map(jnp.add, (grad_sum, metric_sum), (grads, metrics))
        return added[0], added[1] | {"ratio_max": peak}

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        static_argnames="policy_frozen",
        out_shardings=None if shardings is None else (shardings, None),
    )
    def apply(state: TrainState, sums: tuple[Any, Metrics], *, policy_frozen: bool) -> tuple[TrainState, Metrics]:
        grad_sum, metrics = sums
        # Of whole trajectories it is 1 or more; of parts of them it may be less.
        denominator = jnp.where(metrics["denominator"] > 0, metrics["denominator"], 1.0)
        grads, value_grads = jax.tree.map(lambda g: g / denominator, grad_sum)
        means = {name: metrics[name] / denominator for name in metrics if name in OF_THE_LOSS}
        unlike = (*OF_THE_LOSS, "denominator", "tokens", "ratio_max", "ratio_counts")
        count = jnp.maximum(metrics["tokens"], 1)
        means |= {name: metrics[name] / count for name in metrics if name not in unlike}
        means |= {name: metrics[name] for name in ("ratio_max", "ratio_counts", "tokens")}
        means |= {"grad_norm": optax.tree.norm(grads)}
        params, opt_state, critic = state.params, state.opt_state, state.critic
        if not policy_frozen:
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        if critic is not None and value_optimizer is not None:
            updates, value_state = value_optimizer.update(value_grads, critic.opt_state, critic.params)
            critic = Critic(optax.apply_updates(critic.params, updates), value_state)
            means |= {"value_grad_norm": optax.tree.norm(value_grads)}
        return TrainState(params, opt_state, state.updates + 1, critic), means

    return Programs(accumulate, apply, sum_shardings)


def make_update(
    config: DecoderConfig,
    spec: LossSpec,
    optimizer: optax.GradientTransformation,
    shardings: TrainState | None = None,
    *,
    value_optimizer: optax.GradientTransformation | None = None,
    remat: bool = False,
    adapter_scale: float = 1.0,
    device: FairLock | None = None,
) -> Callable[..., tuple[TrainState, dict[str, float]]]:
    """A function that takes one optimizer step on a list of micro-batches, and says what it saw.

    The gradient is that of the loss over the whole list, whatever its split:

        sum over micro-batches of d(sum of losses) / sum over micro-batches of denominators (`rl.aggregate`)

    The function takes (state, micro_batches, *, policy_frozen=False, base=None). With `policy_frozen` the step is the
    value model's alone. With `base` the state's parameters are adapters of these weights, which are read and kept.

    Args:
        shardings: a NamedSharding in the place of each array of the state, where it stays; or each placement that XLA
            chooses for a result is compiled for anew. None leaves it to XLA.
        value_optimizer: for a state that holds a value model.
        remat: as in `loss_sums`.
        adapter_scale: of `models.lora.attach`, for a state of adapters.
        device: held for each micro-batch and for the step, until they are done; None where nothing else runs.
    """
    device = device or FairLock()
    options: dict[str, Any] = {
        "value_optimizer": value_optimizer,
        "remat": remat,
        "adapter_scale": adapter_scale,
    }
    accumulate, apply, sum_shardings = make_programs(config, spec, optimizer, shardings, **options)

    def update(
        state: TrainState, micro_batches: Sequence[Rows], *, policy_frozen: bool = False, base: Params | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        if not micro_batches:
            raise ValueError("expected at least one micro-batch, got none; skip the update and count it")
        if not any(np.any(rows.is_action) for rows in micro_batches):
            # Adam would move the weights all the same, by its running mean.
            raise ValueError("expected at least one action token, got none; skip the update and count it")
        if (state.critic is None) != (value_optimizer is None):
            raise ValueError(
                "expected a value model and an optimizer for it, or neither, got one of the two; "
                "give both to init_state and make_update"
            )
        weights, sums = weights_of(state), no_sums(spec, state)
        if sum_shardings is not None:
            sums = jax.device_put(sums, sum_shardings)
        for rows in micro_batches:
            with device:
                sums = jax.block_until_ready(accumulate(weights, sums, rows, base))
        with device:
            state, means = jax.block_until_ready(apply(state, sums, policy_frozen=policy_frozen))
        counts = np.asarray(means.pop("ratio_counts"))
        found = {name: float(value) for name, value in means.items()}
        return state, found | {"ratio_p99": ratio_quantile(counts, 0.99)}

    return update


def weights_of(state: TrainState) -> tuple[Any, Any]:
    """What is differentiated: the policy's parameters, and the value model's or None."""
    return state.params, None if state.critic is None else state.critic.params


def no_sums(spec: LossSpec, state: TrainState) -> tuple[Any, Metrics]:
    """The sums before the first micro-batch: of gradients, and for the metrics."""
    names = ["loss", "denominator", "tokens", "entropy", "ratio_mean", "clipped_share", "approx_kl", "ratio_max"]
    names += ["reference_kl"] * spec.has_reference + ["value_loss"] * (state.critic is not None)
    metrics = {name: jnp.zeros(()) for name in names} | {"ratio_counts": jnp.zeros(2 * BINS_PER_SIDE + 1)}
    return jax.tree.map(jnp.zeros_like, weights_of(state)), metrics
