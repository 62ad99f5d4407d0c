"""The learner: owns what training changes, and turns a step's groups of rollouts into updates."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Float

from searchrl_jax.config.schema import Experiment
from searchrl_jax.core.fair_lock import FairLock
from searchrl_jax.core.random import named_key
from searchrl_jax.models.axes import ADAPTER_AXES, PARAMETER_AXES, VALUE_HEAD_AXES
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params
from searchrl_jax.models.lora import attach, init_adapters, merge
from searchrl_jax.models.value import init_value_head
from searchrl_jax.parallel.rules import place_rows, tree_shardings
from searchrl_jax.rl.diagnostics import explained_variance
from searchrl_jax.rl.ratios import KL_ESTIMATORS, importance_weights
from searchrl_jax.rollout.batch import RowShape, arrange, fill, pack, unpack
from searchrl_jax.train.learn import (
    GAE,
    Batch,
    Groups,
    Part,
    batch_of,
    gae_advantages,
    group_advantages,
    parts_of,
    split_minibatches,
    to_table,
    with_tables,
)
from searchrl_jax.train.measures import group_metrics, training_metrics
from searchrl_jax.train.state import TrainState, init_state, lora_plus, make_optimizer
from searchrl_jax.train.step import LossSpec, make_score, make_update

# Of a step's minibatches the largest is reported, of all else the mean.
EXTREMES = ("ratio_max", "ratio_p99")


def policy_optimizer(experiment: Experiment, steps: int) -> optax.GradientTransformation:
    """The optimizer of the policy, whose learning rate falls after the critic's warm-up, to the last of `steps`."""
    updates = (steps - experiment.rl.critic_warmup_steps) * experiment.rl.minibatches
    return lora_plus(make_optimizer(experiment.optimizer, max(updates, 1)), experiment.lora.lora_plus_lr_ratio)


def loss_spec(experiment: Experiment, row_shapes: Sequence[RowShape]) -> LossSpec:
    """What the experiment minimises."""
    rl, sampling = experiment.rl, experiment.sampling
    return LossSpec(
        rl.loss_fn,
        rl.clip_low_threshold,
        rl.clip_high_threshold,
        sampling.temperature,
        sampling.sampling_top_p,
        dual_clip=rl.dual_clip,
        aggregation=rl.loss_aggregation,
        normalizer=float(row_shapes[-1].actions) if rl.loss_aggregation == "constant" else None,
        has_reference=bool(rl.kl_coef),
        kl_coef=rl.kl_coef if rl.kl_in == "loss" else 0.0,
        kl_estimator=rl.divergence,
        entropy_coef=rl.entropy_coef,
        value_clip=rl.value_clip,
        value_trunk_coef=rl.value_trunk_coef,
    )


class Learner:
    """One policy in training, with its value model and its reference where the configuration has them.

    Attributes:
        state: all that changes from step to step: what a checkpoint holds, and what is assigned after a restore.
        frozen: the weights that adapters are trained on top of, if there are adapters; no update changes them.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: DecoderConfig,
        base: Params,
        row_shapes: tuple[RowShape, ...],
        mesh: Mesh,
        *,
        steps: int,
        device: FairLock | None = None,
    ) -> None:
        """Args:
        base: where the policy begins, and the reference that it is kept near to; left as it is. With `lora.lora_rank`
            it is frozen, and the state holds adapters alone.
        row_shapes: of training rows, ascending; the last holds any trajectory, and its action tokens are the token
            budget of `rl.loss_aggregation=constant`.
        steps: of the whole run; the learning rate reaches its end with the last. The policy's begins after the critic's
            warm-up.
        device: held while a program of the learner runs; None where nothing else does.
        """
        self.config, self.seed = experiment.rl, experiment.seed
        self.wanted_groups = experiment.batch.global_batch_size
        self.row_shapes, self.mesh, self._device = row_shapes, mesh, device or FairLock()
        rl = self.config
        has_critic = rl.advantage_method == GAE
        optimizer = policy_optimizer(experiment, steps)
        value_rate = experiment.optimizer.value_learning_rate
        value_optimizer = make_optimizer(experiment.optimizer, steps * rl.minibatches, value_rate)
        placed = jax.device_put(base, tree_shardings(mesh, base, PARAMETER_AXES))
        lora = experiment.lora
        self.frozen: Params | None = placed if lora.lora_rank else None
        self._scale = lora.lora_alpha / max(lora.lora_rank, 1)
        if lora.lora_rank:
            key = named_key(experiment.seed, "lora")
            trained = init_adapters(base, lora.lora_targets, lora.lora_rank, key)
        else:
            # Copied: an update donates its state, and the base is needed at the end.
            trained = jax.tree.map(lambda x: x.copy(), base)
        state = init_state(
            trained,
            optimizer,
            init_value_head(model, named_key(experiment.seed, "value")) if has_critic else None,
            value_optimizer if has_critic else None,
        )
        shardings = tree_shardings(mesh, state, {**PARAMETER_AXES, **ADAPTER_AXES, **VALUE_HEAD_AXES})
        self.state: TrainState = jax.device_put(state, shardings)
        self.reference: Params | None = placed if rl.kl_coef else None
        spec = loss_spec(experiment, row_shapes)
        self._update = make_update(
            model,
            spec,
            optimizer,
            shardings,
            value_optimizer=value_optimizer if has_critic else None,
            remat=experiment.optimizer.remat,
            adapter_scale=self._scale,
            device=self._device,
        )
        self._score = make_score(model, spec, mesh)

    @property
    def params(self) -> Params:
        """The policy's parameters. The next `learn` takes their memory: whoever reads them during it needs a copy."""
        return self.state.params if self.frozen is None else attach(self.frozen, self.state.params, self._scale)

    def merged(self) -> Params:
        """The policy as full weights of the base's structure: the adapters, where there are any, merged into it."""
        return self.state.params if self.frozen is None else merge(self.frozen, self.state.params, self._scale)

    def learn(self, groups: Groups, step: int) -> dict[str, float]:
        """Trains on the rollouts of one step, and returns its metrics.

        What the step depends on is (state, groups, step) alone. Numbers under "learner/" are means over the updates
        that the step made; a step whose groups have nothing to teach makes none, and has no such numbers.

        Args:
            groups: equally many rollouts of each prompt.
            step: counted from 1; it seeds the split into minibatches, and ends the critic's warm-up.

        Raises:
            ValueError: rollouts without log-probabilities, longer than a row, or with turn rewards that don't fit.
        """
        rl = self.config
        batch = batch_of(groups, rl)
        parts = parts_of(groups, batch.is_trained)
        tables, estimates, metrics = self._tables(batch, parts)
        samples = [with_tables(part, tables) for part in parts]
        if not (tables["advantage"].any() or self._learns_without_advantage):
            samples, parts = [], []  # the gradient is 0, but Adam would move the weights, by its running mean
        metrics |= group_metrics(groups, batch.is_trained, estimates, wanted_groups=self.wanted_groups)
        metrics |= training_metrics(groups, samples, num_trained=int(batch.is_trained.sum()))
        seen = []
        rollouts, rng = [part.rollout for part in parts], np.random.default_rng([self.seed, step])
        for chosen in split_minibatches(samples, rollouts, rl.minibatches, rng):
            micro_batches = [place_rows(self.mesh, rows) for rows in pack(chosen, self.row_shapes)]
            self.state, found = self._update(
                self.state, micro_batches, policy_frozen=step <= rl.critic_warmup_steps, base=self.frozen
            )
            seen.append(found)
        metrics["training/updates"] = float(len(seen))
        for name in seen[0] if seen else ():
            metrics[f"learner/{name}"] = float((max if name in EXTREMES else np.mean)([found[name] for found in seen]))
        for short, name in (("entropy", "entropy"), ("kl", "approx_kl"), ("grad_norm", "grad_norm")):
            metrics[short] = metrics.get(f"learner/{name}", float("nan"))
        return metrics

    @property
    def _learns_without_advantage(self) -> bool:
        """Something but the advantage has a gradient: the value model, the entropy, or the divergence in the loss."""
        rl = self.config
        return self.state.critic is not None or bool(rl.entropy_coef or (rl.kl_coef and rl.kl_in == "loss"))

    def _tables(
        self, batch: Batch, parts: list[Part]
    ) -> tuple[dict[str, Float[np.ndarray, "N T"]], Float[np.ndarray, " n"], dict[str, float]]:
        """What the loss reads of each action token, the advantages as the method gives them, and metrics of the two."""
        rl, acts = self.config, batch.trained_tokens
        tables: dict[str, Any] = {}
        metrics: dict[str, float] = {}
        penalty: np.ndarray | None = None
        value = np.zeros(acts.shape, np.float32)
        if self.reference is not None:
            tables["reference_logprob"], _ = self._scored(self.reference, None, batch, parts)
            if rl.kl_in == "reward":
                divergence = KL_ESTIMATORS[rl.divergence](
                    jnp.asarray(batch.behavior_logprob), jnp.asarray(tables["reference_logprob"]), jnp.asarray(acts)
                )
                penalty = rl.kl_coef * np.asarray(divergence)
        critic = self.state.critic
        if critic is not None or rl.proximal_policy == "learner":
            value_params = None if critic is None else critic.params
            tables["proximal_logprob"], value = self._scored(self.params, value_params, batch, parts)
        if critic is not None:
            advantage, target = gae_advantages(batch, rl, value, penalty)
            estimates = advantage[acts]
            tables |= {"value": value, "value_target": target}
            metrics["learner/explained_variance"] = explained_variance(value, target, acts)
            metrics["learner/value_mean"] = float(value[acts].mean()) if acts.any() else 0.0
        else:
            advantage, estimates = group_advantages(batch, rl, penalty)
        if rl.importance_weight != "none":
            weight = np.asarray(
                importance_weights(
                    jnp.asarray(tables["proximal_logprob"]),
                    jnp.asarray(batch.behavior_logprob),
                    jnp.asarray(acts),
                    level=rl.importance_weight,
                    cap=rl.importance_cap,
                )
            )
            # The losses are homogeneous in the advantage, so this weighs them.
            advantage = advantage * weight
            metrics["learner/importance_weight_mean"] = float(weight[acts].mean()) if acts.any() else 1.0
        if rl.proximal_policy == "sampler":
            tables.pop("proximal_logprob", None)
        return tables | {"advantage": advantage}, estimates, metrics

    def _scored(
        self, params: Params, value_params: Params | None, batch: Batch, parts: list[Part]
    ) -> tuple[Float[np.ndarray, "N T"], Float[np.ndarray, "N T"]]:
        """Log-probability of each action token under `params`, and the value before it."""
        samples = [part.sample for part in parts]
        layouts = arrange(samples, self.row_shapes)
        found = []
        for layout in layouts:
            rows = place_rows(self.mesh, fill([[samples[i] for i in row] for row in layout.rows], layout.shape))
            with self._device:
                found.append(jax.device_get(self._score(params, value_params, rows)))
        logprob, value = (
            to_table(parts, unpack(samples, layouts, [pair[i] for pair in found]), batch.is_action.shape)
            for i in range(2)
        )
        return logprob, value
