"""The learner: every method with every loss, the value model, reference and proximal policies, on a tiny decoder."""

import functools
import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.config.cli import parse
from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.config.schema import Experiment
from searchrl_jax.parallel.mesh import make_mesh
from searchrl_jax.rl.losses import LOSSES
from searchrl_jax.rollout.batch import RowShape
from searchrl_jax.rollout.trajectory import Trajectory
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params
from searchrl_jax.train import learner as learner_module
from searchrl_jax.train.learn import METHODS, Batch, batch_of, parts_of
from searchrl_jax.train.learner import Learner
from searchrl_jax.train.state import make_optimizer

V = 40
MODEL = replace(tiny_decoder_config(V, conv_width=0), num_layers=1)
BASE = tiny_params(MODEL, 0)
SHAPES = (RowShape(2, 40, 26),)
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
MEMBERS = [(1.0, (3, 2)), (0.0, (1,)), (0.25, (2, 2, 2)), (0.0, (6,)), (0.5, (1, 4)), (None, (2,))]


def experiment(**settings: Any) -> Experiment:
    names = {name.replace("__", "."): value for name, value in settings.items()}
    return with_overrides(Experiment(exp="x", scale="tiny"), {"optimizer.learning_rate": 1e-2, **names})


@functools.lru_cache
def made(**settings: Any) -> tuple[Learner, Any]:
    """A learner and its first state, which each test copies: an update donates what it is given."""
    learner = Learner(experiment(**settings), MODEL, BASE, SHAPES, make_mesh(1, 1, 1, jax.devices()[:1]), steps=5)
    return learner, learner.state


def learner_with(**settings: Any) -> Learner:
    """A learner as new. Those that differ in the advantage alone share what is compiled."""
    method = settings.pop("rl__advantage_method", "group_based")
    learner, state = made(**settings, **({"rl__advantage_method": "gae"} if method == "gae" else {}))
    learner.state = jax.tree.map(jnp.copy, state)
    learner.config = replace(learner.config, advantage_method=method)
    return learner


def trajectory(uid: int, reward: float | None, lengths: tuple[int, ...]) -> Trajectory:
    """Three tokens of prompt, then turns of `lengths` tokens with two tokens of observation between them."""
    turn = [-1, -1, -1]
    for number, length in enumerate(lengths):
        turn += [number] * length + [-1, -1]
    turns = np.array(turn[:-2], np.int32)
    rng = np.random.default_rng(uid)
    return Trajectory(
        uid=uid,
        task_id="t",
        token_ids=rng.integers(0, V, len(turns)).astype(np.int32),
        is_action=turns >= 0,
        behavior_logprob=np.where(turns >= 0, -1.0, 0.0).astype(np.float32),
        policy_version=np.where(turns >= 0, 0, -1).astype(np.int32),
        turn=turns,
        status="tool_failure" if reward is None else "submitted",
        reward=reward,
    )


@functools.lru_cache
def groups(noise: float = 0.0, flat: bool = False) -> tuple[tuple[Trajectory, ...], ...]:
    """Two groups of three rollouts of the base policy, or of one whose log-probabilities are off by `noise`."""
    found = [trajectory(uid, 0.0 if flat else reward, lengths) for uid, (reward, lengths) in enumerate(MEMBERS)]
    learner = learner_with()
    batch, parts = scoring([found[:3], found[3:]])
    logprob, _ = learner._scored(BASE, None, batch, parts)
    rng = np.random.default_rng(0)
    for n, each in enumerate(found):
        each.behavior_logprob[each.is_action] = logprob[n, : each.num_action_tokens]
        each.behavior_logprob[each.is_action] += rng.normal(scale=noise, size=each.num_action_tokens)
    return tuple(found[:3]), tuple(found[3:])


def scoring(rollouts: Any) -> tuple[Batch, Any]:
    batch = batch_of(rollouts, experiment().rl)
    return batch, parts_of(rollouts, np.ones(batch.is_valid.shape, bool))


def difference(one: Any, other: Any) -> float:
    return max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_scale_local_takes_every_method_with_every_loss(options: Any) -> None:
    spec = importlib.util.spec_from_file_location("mtrl_search", ROOT / "experiments" / "mtrl_search.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for method, loss in itertools.product(METHODS, LOSSES):
        argv = options({"rl.advantage_method": method, "rl.loss_fn": loss})
        found = parse(argv, lambda _: module.config, ["mtrl_search"], prog="x").experiment
        assert (found.scale, found.rl.advantage_method, found.rl.loss_fn) == ("local", method, loss)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_with_every_loss(method: str, loss: str) -> None:
    learner = learner_with(rl__advantage_method=method, rl__loss_fn=loss)
    metrics = learner.learn(groups(), 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.state))
    assert 1e-4 < difference(learner.params, BASE) < 0.1
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["learner/ratio_mean"] == pytest.approx(1, abs=1e-4)  # fault 21
    assert metrics["learner/ratio_p99"] == 1 and metrics["learner/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert metrics["learner/grad_norm"] > 0 and metrics["learner/entropy"] > 0
    assert metrics["learner/approx_kl"] == pytest.approx(0, abs=1e-6) and metrics["learner/clipped_share"] == 0
    assert metrics["learner/tokens"] == 5 + 1 + 6 + 6 + 5 and metrics["training/num_datums"] == 5
    assert ("learner/explained_variance" in metrics) == (method == "gae")
    assert not [name for name in metrics if f"`{name}`" not in PAGE], "names that docs/metrics.md lacks"


def test_a_compressed_rollout_trains_each_of_its_action_tokens_once() -> None:
    learner = learner_with(rl__advantage_method="gae", rl__loss_fn="ppo")
    (first, *others), second = groups()
    metrics = learner.learn(((replace(first, row_starts=(0, 7)), *others), second), 1)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["learner/tokens"] == metrics["training/trainable_token_positions"] == 5 + 1 + 6 + 6 + 5
    assert metrics["training/num_datums"] == 6 and metrics["training/datums_per_trajectory"] == 6 / 5


def test_the_policy_begins_as_the_base_and_leaves_it_alone() -> None:  # fault 23
    before = jax.tree.map(np.array, BASE)
    learner = learner_with()
    assert difference(learner.params, BASE) == 0
    learner.learn(groups(), 1)
    assert difference(before, BASE) == 0 and difference(learner.params, BASE) > 0


def test_a_step_follows_from_state_groups_and_number_alone() -> None:
    first = learner_with(rl__minibatches=2)
    states, rows = [], []
    for step in (1, 1, 2):
        first.state = jax.tree.map(jnp.copy, made(rl__minibatches=2)[1])
        rows.append(first.learn(groups(), step))
        states.append(jax.tree.map(jnp.copy, first.state))
    assert difference(states[0], states[1]) == 0 and rows[0] == rows[1]
    assert difference(states[0], states[2]) > 0, "another step splits its minibatches another way"
    assert int(states[0].updates) == 2


def test_groups_that_teach_nothing_make_no_update() -> None:
    learner = learner_with()
    metrics = learner.learn(groups(flat=True), 1)
    assert difference(learner.params, BASE) == 0 and int(learner.state.updates) == 0
    assert (
        metrics["analysis/zero_adv_groups"] == 2
        and np.isnan([metrics[name] for name in ("entropy", "kl", "grad_norm")]).all()
    )
    assert "learner/loss" not in metrics


def test_the_critic_warms_up_alone_and_comes_to_explain_the_returns() -> None:
    settings = {"rl__advantage_method": "gae", "optimizer__value_learning_rate": 0.01, "rl__critic_warmup_steps": 30}
    learner, state = made(**settings)
    learner.state = jax.tree.map(jnp.copy, state)
    rows = [learner.learn(groups(), step) for step in range(1, 31)]
    assert difference(learner.params, BASE) == 0
    assert difference(learner.state.opt_state, state.opt_state) == 0
    explained = [row["learner/explained_variance"] for row in rows]
    assert explained[0] == pytest.approx(0, abs=1e-5) and explained[-1] > 0.5
    assert rows[-1]["learner/value_loss"] < rows[0]["learner/value_loss"] / 2
    learner.learn(groups(), 31)
    assert difference(learner.params, BASE) > 0


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_the_value_loss_reaches_the_trunk_only_if_asked(coefficient: float, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, state = made(rl__advantage_method="gae", rl__value_trunk_coef=coefficient)
    head = {"value": {"kernel": jnp.ones((MODEL.model_dim, 1)), "bias": jnp.zeros(1)}}
    learner.state = jax.tree.map(jnp.copy, state.replace(critic=state.critic.replace(params=head)))
    tables_of = learner._tables

    def without_advantage(batch: Batch, parts: Any) -> Any:
        tables, estimates, metrics = tables_of(batch, parts)
        return tables | {"advantage": np.zeros_like(tables["advantage"])}, estimates, metrics

    monkeypatch.setattr(learner, "_tables", without_advantage)
    learner.learn(groups(), 1)
    assert (difference(learner.params, BASE) > 1e-4) == (coefficient > 0)
    assert difference(learner.state.critic.params, head) > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_in_the_loss_pulls_towards_the_reference(estimator: str) -> None:  # fault 17
    # Steps small enough for the slope to tell where they lead.
    learner, state = made(rl__kl_coef=1.0, rl__kl_estimator=estimator, optimizer__learning_rate=3e-5)
    learner.config = replace(learner.config, advantage_method="monte_carlo", advantage_normalization=False)
    noisy = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(3), x.shape), state.params)
    learner.state = jax.tree.map(jnp.copy, state.replace(params=noisy))
    # Rewards of 0: the divergence is all that there is.
    metrics = learner.learn(groups(flat=True), 1)
    assert metrics["learner/reference_kl"] > 1e-3 and metrics["learner/grad_norm"] > 0
    learner.learn(groups(flat=True), 2)
    if estimator != "k1":  # of either sign on single tokens: only its mean is sure to pull
        after = learner.learn(groups(flat=True), 3)
        assert after["learner/reference_kl"] < metrics["learner/reference_kl"]


def test_the_divergence_in_the_reward_lowers_what_a_rollout_earned() -> None:
    settings = {"rl__kl_coef": 0.5, "rl__kl_in": "reward", "rl__kl_estimator": "k1"}
    learner, state = made(**settings)
    learner.config = replace(learner.config, advantage_method="monte_carlo", advantage_normalization=False)
    rollouts = groups(0.3)
    batch = batch_of(rollouts, learner.config)
    tables, _, _ = learner._tables(batch, parts_of(rollouts, batch.is_trained))
    paid = rollouts[0][1]  # one turn of one token, reward 0
    expected = -0.5 * (batch.behavior_logprob[1, 0] - tables["reference_logprob"][1, 0])
    assert tables["advantage"][1, 0] == pytest.approx(expected, abs=1e-6) and abs(expected) > 1e-3 and paid.reward == 0
    learner.state = jax.tree.map(jnp.copy, state)
    assert "learner/reference_kl" in learner.learn(rollouts, 1)


def test_the_learner_s_own_log_probabilities_take_the_sampler_s_place() -> None:
    """Decoupled: the ratio begins at 1, however far the sampler was, and the distance to it is still reported."""
    off = learner_with().learn(groups(0.3), 1)
    assert off["learner/ratio_max"] > 1.2 and off["learner/clipped_share"] > 0.2
    found = learner_with(rl__proximal_policy="learner").learn(groups(0.3), 1)
    assert found["learner/ratio_max"] == pytest.approx(1, abs=1e-4) and found["learner/clipped_share"] == 0
    assert found["learner/approx_kl"] == pytest.approx(off["learner/approx_kl"], rel=1e-4)
    assert off["learner/approx_kl"] > 1e-3


def test_weights_to_the_proximal_policy_and_ratios_from_it_make_the_whole_ratio() -> None:
    """w * pi / proximal = pi / sampler: decoupled importance sampling without a cap is importance sampling."""
    plain = learner_with(rl__loss_fn="importance_sampling")
    plain.learn(groups(0.3), 1)
    parted = learner_with(
        rl__loss_fn="importance_sampling",
        rl__proximal_policy="learner",
        rl__importance_weight="token",
        rl__importance_cap=None,
    )
    metrics = parted.learn(groups(0.3), 1)
    assert difference(plain.state.opt_state, parted.state.opt_state) < 1e-5 < difference(parted.params, BASE)
    assert metrics["learner/importance_weight_mean"] != 1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_multiply_the_advantage(level: str) -> None:
    learner, _ = made(rl__proximal_policy="learner", rl__importance_weight=level, rl__importance_cap=1.1)
    rollouts = groups(0.3)
    batch = batch_of(rollouts, learner.config)
    parts = parts_of(rollouts, batch.is_trained)
    tables, estimates, _ = learner._tables(batch, parts)
    for n in range(5):
        count = int(batch.is_action[n].sum())
        logs = (tables["proximal_logprob"] - batch.behavior_logprob)[n, :count]
        weights = np.exp(logs) if level == "token" else np.full(count, np.exp(logs.sum()))
        np.testing.assert_allclose(
            tables["advantage"][n, :count], estimates[n] * np.minimum(weights, 1.1), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "constant"])
def test_the_value_of_the_loss_by_hand(how: str) -> None:
    """On policy the ratio is 1, so the loss is minus the average advantage: each average, in plain numbers."""
    learner, state = made(rl__loss_aggregation=how, rl__loss_fn="importance_sampling")
    learner.state = jax.tree.map(jnp.copy, state)
    learner.config = replace(learner.config, advantage_method="monte_carlo", advantage_normalization=False)
    trained = [(reward, sum(lengths)) for reward, lengths in MEMBERS if reward is not None]
    expected = {
        "token_mean": sum(r * n for r, n in trained) / sum(n for _, n in trained),
        "sequence_mean": sum(r for r, _ in trained) / len(trained),
        "constant": sum(r * n for r, n in trained) / (len(trained) * SHAPES[-1].actions),
    }
    metrics = learner.learn(groups(), 1)
    assert metrics["learner/loss"] == pytest.approx(-expected[how], rel=1e-4)
    assert metrics["learner/ratio_mean"] == pytest.approx(1, abs=1e-4)  # of tokens, whatever the loss averages over


def test_the_estimator_follows_from_where_the_divergence_is_charged() -> None:
    assert experiment(rl__kl_coef=0.1).rl.divergence == "k3"
    assert experiment(rl__kl_coef=0.1, rl__kl_in="reward").rl.divergence == "k1"
    assert experiment(rl__kl_coef=0.1, rl__kl_in="reward", rl__kl_estimator="k2").rl.divergence == "k2"


@pytest.mark.parametrize(("settings", "moves"), [({}, False), ({"rl__entropy_coef": 0.1}, True)])
def test_advantages_of_zero_move_nothing_but_what_learns_without_them(settings: dict[str, Any], moves: bool) -> None:
    """Adam goes on by its running mean where the gradient is 0."""
    learner, state = made(**settings)
    learner.config = replace(learner.config, advantage_method="monte_carlo", advantage_normalization=True)
    learner.state = jax.tree.map(jnp.copy, state)
    learner.learn(groups(), 1)
    before = jax.tree.map(np.array, learner.state)
    metrics = learner.learn(groups(flat=True), 2)
    assert (difference(before.params, learner.params) > 0) == moves
    assert metrics["training/updates"] == int(learner.state.updates) - int(before.updates) == int(moves)
    assert ("learner/loss" in metrics) == moves == np.isfinite(metrics["grad_norm"])


@pytest.mark.parametrize(("warmup", "updates"), [(0, 5), (3, 2)])
def test_the_learning_rate_reaches_its_end_with_the_last_step(
    warmup: int, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind the critic's warm-up, in which the policy's schedule stands still."""
    spans = []

    def recorded(config: Any, span: int, *rest: Any) -> Any:
        spans.append(span)
        return make_optimizer(config, span, *rest)

    monkeypatch.setattr(learner_module, "make_optimizer", recorded)
    settings = {"rl__advantage_method": "gae", "rl__critic_warmup_steps": warmup, "optimizer__learning_rate_end": 0.0}
    learner = Learner(experiment(**settings), MODEL, BASE, SHAPES, make_mesh(1, 1, 1, jax.devices()[:1]), steps=5)
    for step in range(1, 6):
        learner.learn(groups(), step)
        assert (difference(learner.params, BASE) > 0) == (step > warmup)
    leaves = jax.tree_util.tree_leaves_with_path(learner.state.opt_state)
    assert {int(x) for path, x in leaves if "count" in jax.tree_util.keystr(path)} == {updates}
    assert spans == [updates, 5], "of the policy, and of the value model"


def test_the_entropy_bonus_raises_the_entropy() -> None:
    learner, state = made(rl__entropy_coef=1.0, optimizer__learning_rate=1e-4)
    learner.config = replace(learner.config, advantage_method="monte_carlo", advantage_normalization=False)
    learner.state = jax.tree.map(jnp.copy, state)
    found = [learner.learn(groups(flat=True), step)["learner/entropy"] for step in (1, 2, 3)]
    assert found[0] < found[1] < found[2]
