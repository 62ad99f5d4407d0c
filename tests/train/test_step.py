"""The update: what it depends on, and above all what it does not."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from searchrl_jax.models.axes import PARAMETER_AXES
from searchrl_jax.ops import attention
from searchrl_jax.ops.sampling import processed_log_probs
from searchrl_jax.parallel.mesh import make_mesh
from searchrl_jax.parallel.rules import place_rows, tree_shardings
from searchrl_jax.rollout.batch import RowShape, Sample, pack
from searchrl_jax.rollout.engine import Engine, Sampling, Shapes
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_params
from searchrl_jax.train import step
from searchrl_jax.train.state import init_state
from searchrl_jax.train.step import LossSpec, action_log_probs, entropy_of, loss_sums, make_update

V, L, A = 60, 48, 30
CONFIG = tiny_decoder_config(V)
PARAMS = tiny_params(CONFIG, 0)
PPO = LossSpec("ppo")
# One shape for all tests, so that each function compiles once.
SHAPE = RowShape(4, L, A)


@functools.partial(jax.jit, static_argnums=0)
def sums_and_grads(spec, params, rows):
    return jax.value_and_grad(functools.partial(loss_sums, CONFIG, spec), has_aux=True)(params, rows)


@functools.lru_cache
def samples():
    """Six samples of random ids, with behaviour log-probabilities near the policy's own."""
    rng = np.random.default_rng(0)
    made = []
    for length in (12, 20, 9, 15, 22, 11):
        is_action = np.zeros(length, bool)
        is_action[3:6], is_action[-2:] = True, True
        made.append(
            Sample(rng.integers(0, V, length), is_action, np.zeros(length, np.float32), rng.normal(size=length))
        )
    return [with_behaviour(sample, rng.normal(scale=0.1, size=len(sample.token_ids))) for sample in made]


log_probs_of = jax.jit(action_log_probs, static_argnums=0, static_argnames=("temperature", "top_p"))


def with_behaviour(sample, noise):
    (rows,) = pack([sample], [SHAPE])
    got, _ = log_probs_of(CONFIG, PARAMS, rows, temperature=1.0, top_p=1.0)
    behaviour = np.zeros(len(sample.token_ids), np.float32)
    behaviour[sample.is_action] = np.asarray(got)[0, : sample.is_action.sum()]
    return Sample(sample.token_ids, sample.is_action, (behaviour + noise).astype(np.float32), sample.advantage)


def total(batches, spec=PPO):
    """Loss, gradient and token count of several micro-batches together."""
    parts = [sums_and_grads(spec, PARAMS, rows) for rows in batches]
    loss = sum(float(part[0][0]) for part in parts)
    tokens = sum(float(part[0][1]["tokens"]) for part in parts)
    return loss, jax.tree.map(lambda *grads: sum(grads), *[part[1] for part in parts]), tokens


def assert_same(one, two):
    assert one[0] == pytest.approx(two[0], abs=2e-5) and one[2] == two[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), one[1], two[1])


def test_packing_order_and_split_change_nothing():
    packed = pack(samples(), [SHAPE])
    alone = [batch for sample in samples() for batch in pack([sample], [SHAPE])]
    assert len(packed) == 1 and len(alone) == 6
    want = total(packed)
    assert want[2] == 30 and abs(want[0]) > 0.01
    assert_same(total(alone), want)
    assert_same(total([*pack(samples()[:2], [SHAPE]), *pack(samples()[2:], [SHAPE])]), want)
    turned = jax.tree.map(lambda x: x[[2, 0, 3, 1]], packed[0])
    assert_same(total([turned]), want)


def test_padding_of_any_kind_changes_nothing():
    (rows,) = pack(samples()[:5], [SHAPE])
    padding, no_action = rows.segment_ids == 0, ~rows.is_action
    assert padding.any() and no_action.any()
    poisoned = rows.replace(
        token_ids=np.where(padding, V - 1, rows.token_ids),
        behavior_logprob=np.where(no_action, np.nan, rows.behavior_logprob),
        advantage=np.where(no_action, np.nan, rows.advantage),
        target=np.where(no_action, 7, rows.target),
    )
    assert_same(total([poisoned]), total([rows]))


def test_what_stands_at_tool_tokens_is_not_a_target():
    """Neither the log-probability nor the advantage stored at a token that the policy did not sample is read."""

    def poison(sample):
        off = ~sample.is_action
        return Sample(
            sample.token_ids,
            sample.is_action,
            np.where(off, np.nan, sample.behavior_logprob).astype(np.float32),
            np.where(off, 1e6, sample.advantage),
        )

    assert_same(total(pack([poison(sample) for sample in samples()], [SHAPE])), total(pack(samples(), [SHAPE])))


def test_the_loss_reads_no_logit_but_those_that_predict_actions():
    """A last observation, after all actions, changes nothing, though it is part of the row."""
    sample = samples()[0]
    longer = Sample(
        np.append(sample.token_ids, [1, 2, 3]),
        np.append(sample.is_action, [False] * 3),
        np.append(sample.behavior_logprob, [0.0] * 3),
        np.append(sample.advantage, [9.0] * 3),
    )
    assert_same(total(pack([longer], [SHAPE])), total(pack([sample], [SHAPE])))


def test_every_action_token_counts_alike_however_long_its_row():
    length = 91
    rng = np.random.default_rng(1)
    long = Sample(
        rng.integers(0, V, length), np.arange(length) > 0, np.zeros(length, np.float32), np.ones(length)
    )  # 90 actions
    short = Sample(rng.integers(0, V, 5), np.arange(5) == 4, np.zeros(5, np.float32), np.ones(5))  # 1 action
    shape = RowShape(2, 96, 90)
    (both,) = pack([short, long], [shape])
    spec = LossSpec("cross_entropy")

    @jax.jit
    def both_ways(params, rows):
        logprob, _ = action_log_probs(CONFIG, params, rows, temperature=1.0, top_p=1.0)
        return logprob, loss_sums(CONFIG, spec, params, rows)[1]

    logprob, metrics = both_ways(PARAMS, both)
    assert float(metrics["tokens"]) == 91
    per_token = np.asarray(logprob)[both.is_action]
    assert float(metrics["loss"]) / 91 == pytest.approx(-per_token.mean(), rel=1e-5)
    # A mean of the rows' means would be another number.
    assert -per_token.mean() != pytest.approx(-(per_token[:90].mean() + per_token[90]) / 2, rel=1e-2)


def test_the_update_divides_once_whatever_the_split():
    update = make_update(CONFIG, PPO, optax.sgd(0.1))
    splits = {
        "one": pack(samples(), [SHAPE]),
        "two": [*pack(samples()[:1], [SHAPE]), *pack(samples()[1:], [SHAPE])],
    }
    got = {}
    for name, batches in splits.items():
        state = init_state(jax.tree.map(jnp.array, PARAMS), optax.sgd(0.1))
        got[name] = update(state, batches)
        assert int(got[name][0].updates) == 1
    loss, grads, tokens = total(splits["one"])
    want = jax.tree.map(lambda p, g: p - 0.1 * g / tokens, PARAMS, grads)
    for state, metrics in got.values():
        assert metrics["loss"] == pytest.approx(loss / tokens, abs=1e-6) and metrics["tokens"] == 30
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), state.params, want)
    assert got["one"][1]["ratio_max"] == pytest.approx(got["two"][1]["ratio_max"], rel=1e-5)


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, Shapes(3, L, 4, (3,), (8,), (64,)), (3,), jax.random.key(1))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.9)])
def test_on_policy_ratios_are_one(engine, temperature, top_p):  # fault 21
    """Engine and learner agree on every sampled token, across observations, slots and packed rows."""
    is_action, stored = {}, {}
    for slot, prompt in enumerate(([5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17])):
        engine.start(slot, slot, prompt)
        is_action[slot], stored[slot] = [False] * len(prompt), [0.0] * len(prompt)
    sampling = Sampling(temperature, top_p)
    for observation in ([20, 21, 22], [23, 24, 25, 26, 27, 28, 29, 30, 31, 32], []):
        engine.flush(PARAMS)
        chunk = engine.decode(PARAMS, np.array([4, 3, 4]), sampling)
        for slot, count in enumerate(chunk.count):
            is_action[slot] += [True] * count + [False] * len(observation)
            stored[slot] += chunk.logprobs[slot, :count].tolist() + [0.0] * len(observation)
            engine.extend(slot, observation)
    found = [
        Sample(
            np.array(engine.ids[slot]), np.array(is_action[slot]), np.float32(stored[slot]), np.ones(len(stored[slot]))
        )
        for slot in range(3)
    ]
    rows = pack(found, [SHAPE])
    assert sum(int(batch.is_action.sum()) for batch in rows) > 15
    for batch in rows:
        learner, entropy = log_probs_of(CONFIG, PARAMS, batch, temperature=temperature, top_p=top_p)
        ratio = np.exp(np.asarray(learner) - batch.behavior_logprob)[batch.is_action]
        np.testing.assert_allclose(ratio, 1, atol=1e-4)
        assert np.isfinite(np.asarray(learner)).all() and (np.asarray(entropy) >= 0).all()
        raw, _ = log_probs_of(CONFIG, PARAMS, batch, temperature=1.0, top_p=1.0)
        if (temperature, top_p) != (1.0, 1.0):
            wrong = np.exp(np.asarray(raw) - batch.behavior_logprob)[batch.is_action]
            assert np.abs(wrong - 1).max() > 0.05, "the test would not see a raw log-probability"


def test_metrics_of_an_on_policy_batch():
    behaviour = [with_behaviour(sample, 0.0) for sample in samples()]
    (_, metrics), _ = sums_and_grads(PPO, PARAMS, pack(behaviour, [SHAPE])[0])
    tokens = float(metrics["tokens"])
    assert float(metrics["ratio_mean"]) / tokens == pytest.approx(1, abs=1e-5)
    assert float(metrics["ratio_max"]) == pytest.approx(1, abs=1e-4)
    assert float(metrics["clipped_share"]) == 0
    assert 0 < float(metrics["entropy"]) / tokens < np.log(V)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_entropy_and_its_gradient_equal_a_loop_over_the_vocabulary(temperature, top_p):
    """Of one row's logits: -sum p log p over the nucleus, and finite differences of it."""
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=2, size=9)

    def loop(logits):
        scaled = [x / temperature for x in logits]
        largest = max(scaled)
        weights = [math.exp(x - largest) for x in scaled]
        probabilities = [w / sum(weights) for w in weights]
        kept, mass = [], 0.0
        for p in sorted(probabilities, reverse=True):
            if mass < top_p:
                kept.append(p)
                mass += p
        return -sum(p / mass * math.log(p / mass) for p in kept)

    def entropy(logits):
        log_probs = processed_log_probs(logits[None], temperature=temperature, top_p=top_p)
        return entropy_of(log_probs)[0]

    found, gradient = jax.value_and_grad(entropy)(jnp.asarray(logits, jnp.float32))
    assert float(found) == pytest.approx(loop(logits), abs=1e-5)
    for i in range(len(logits)):
        step = 1e-5 * np.eye(len(logits))[i]
        assert float(gradient[i]) == pytest.approx((loop(logits + step) - loop(logits - step)) / 2e-5, abs=1e-4)


@pytest.mark.parametrize("coefficient", [0.3, -0.1])
def test_the_entropy_coefficient_takes_its_share_off_the_loss_and_moves_the_entropy(coefficient):
    packed = pack(samples(), [SHAPE])
    plain, shared = (total(packed, LossSpec("ppo", entropy_coef=c)) for c in (0.0, coefficient))
    entropy = sum(float(sums_and_grads(PPO, PARAMS, rows)[0][1]["entropy"]) for rows in packed)
    assert entropy > 1
    assert shared[0] == pytest.approx(plain[0] - coefficient * entropy, rel=1e-5)
    pull = jax.tree.map(jnp.subtract, shared[1], plain[1])
    moved = jax.tree.map(lambda p, g: p - 1e-3 * g, PARAMS, pull)
    (rows,) = packed
    _, after = log_probs_of(CONFIG, moved, rows, temperature=1.0, top_p=1.0)
    change = float(jnp.where(rows.is_action, after, 0).sum()) - entropy
    assert change * coefficient > 0


def test_nothing_to_learn_from_is_refused():  # fault 7
    update = make_update(CONFIG, PPO, optax.adam(0.1))
    state = init_state(PARAMS, optax.adam(0.1))
    with pytest.raises(ValueError, match="at least one micro-batch, got none"):
        update(state, [])
    (rows,) = pack(samples(), [SHAPE])
    with pytest.raises(ValueError, match="at least one action token, got none"):
        update(state, [rows.replace(is_action=np.zeros_like(rows.is_action))])


# Everything that a loss can be made of, in rows with 1 and with 90 action tokens, for each way to average.

WIDE = RowShape(4, 100, 96)
HEAD = {"value": {"kernel": 0.1 * jax.random.normal(jax.random.key(5), (CONFIG.model_dim, 1)), "bias": jnp.ones(1)}}


def full_spec(how):
    return LossSpec(
        "ppo",
        dual_clip=3.0,
        aggregation=how,
        normalizer=96.0 if how == "constant" else None,
        has_reference=True,
        kl_coef=0.3,
        entropy_coef=0.1,
        value_clip=0.2,
        value_trunk_coef=0.5,
    )


@functools.lru_cache
def ragged():
    """Trajectories of 1, 90, 4 and 4 action tokens; one of the last two comes in two parts."""
    rng = np.random.default_rng(3)
    made = []
    for actions, whole in ((1, 1), (90, 90), (2, 4), (4, 4), (2, 4)):
        is_action = np.arange(actions + 2) > 1
        draw = functools.partial(rng.normal, size=len(is_action))
        made.append(
            Sample(
                rng.integers(0, V, len(is_action)),
                is_action,
                draw(-4, 0.3).astype(np.float32),
                draw(),
                trajectory_tokens=whole,
                proximal_logprob=draw(-4, 0.3),
                reference_logprob=draw(-4, 0.3),
                value=draw(),
                value_target=draw(),
            )
        )
    return made


@functools.partial(jax.jit, static_argnums=0)
def full_sums(spec, weights, rows):
    return jax.value_and_grad(lambda w: loss_sums(CONFIG, spec, w[0], rows, w[1]), has_aux=True)(weights)


def full_gradient(spec, batches):
    parts = [full_sums(spec, (PARAMS, HEAD), rows) for rows in batches]
    loss = sum(float(part[0][0]) for part in parts)
    denominator = sum(float(part[0][1]["denominator"]) for part in parts)
    grads = jax.tree.map(lambda *grads: sum(grads) / denominator, *[part[1] for part in parts])
    return loss / denominator, grads, denominator


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "constant"])
def test_every_part_of_the_loss_is_the_same_for_any_layout(how):
    spec = full_spec(how)
    (packed,) = pack(ragged(), [WIDE])
    assert packed.segment_ids.max() > 1
    want = full_gradient(spec, [packed])
    # The parts of a trajectory count as one, in one micro-batch or in two.
    assert want[2] == pytest.approx({"token_mean": 99, "sequence_mean": 4, "constant": 4 * 96}[how], rel=1e-6)
    layouts = {
        "alone": [batch for sample in ragged() for batch in pack([sample], [WIDE])],
        "in two": [*pack(ragged()[:3], [WIDE]), *pack(ragged()[3:], [WIDE])],
        "rows turned": [jax.tree.map(lambda x: x[[2, 0, 3, 1]], packed)],
        "samples turned": pack(ragged()[::-1], [WIDE]),
    }
    for name, batches in layouts.items():
        loss, grads, denominator = full_gradient(spec, batches)
        assert loss == pytest.approx(want[0], rel=1e-5) and denominator == pytest.approx(want[2], rel=1e-6), name
        for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want[1]), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def test_scores_and_logits_made_piece_by_piece_change_nothing(monkeypatch):
    spec = full_spec("sequence_mean")
    (rows,) = pack(ragged(), [WIDE])
    want = full_sums(spec, (PARAMS, HEAD), rows)
    monkeypatch.setattr(step, "LOGITS_AT_ONCE", 7 * V)
    monkeypatch.setattr(attention, "LONG_ROW", 16)

    def pieces(weights):
        return loss_sums(CONFIG, spec, weights[0], rows, weights[1])

    assert f"7,{V}]" in str(jax.make_jaxpr(pieces)((PARAMS, HEAD))), "7 tokens at a time"
    got = jax.jit(jax.value_and_grad(pieces, has_aux=True))((PARAMS, HEAD))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * max(1, np.abs(other).max()))


def test_poison_at_places_without_an_action_reaches_no_part_of_the_loss():  # faults 6, 15 and 17
    (rows,) = pack(ragged(), [WIDE])
    names = ("behavior_logprob", "advantage", "proximal_logprob", "reference_logprob", "value", "value_target")
    poisoned = rows.replace(**{n: np.where(rows.is_action, vars(rows)[n], np.nan).astype(np.float32) for n in names})
    spec = full_spec("sequence_mean")
    for one, other in zip(
        jax.tree.leaves(full_sums(spec, (PARAMS, HEAD), poisoned)),
        jax.tree.leaves(full_sums(spec, (PARAMS, HEAD), rows)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_the_entropy_s_gradient_is_finite_outside_the_nucleus():
    spec = LossSpec("ppo", entropy_coef=1.0, top_p=0.5)
    (_, metrics), grads = sums_and_grads(spec, PARAMS, pack(samples(), [SHAPE])[0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((metrics, grads)))


def test_remat_changes_no_gradient():
    (rows,) = pack(samples(), [SHAPE])
    again, plain = (
        jax.jit(jax.grad(lambda p, remat=remat: loss_sums(CONFIG, PPO, p, rows, remat=remat)[0]))
        for remat in (True, False)
    )
    assert "optimization_barrier" in again.lower(PARAMS).as_text()
    assert "optimization_barrier" not in plain.lower(PARAMS).as_text()
    want = sums_and_grads(PPO, PARAMS, rows)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), again(PARAMS), want)


def test_micro_batches_of_one_shape_are_compiled_for_once(caplog):
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    state = init_state(PARAMS, optax.sgd(0.1))
    shardings = tree_shardings(mesh, state, PARAMETER_AXES)
    state = jax.device_put(jax.tree.map(jnp.copy, state), shardings)
    update = make_update(CONFIG, PPO, optax.sgd(0.1), shardings)
    batches = [place_rows(mesh, pack([sample], [SHAPE])[0]) for sample in samples()[:3]]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(2):
            state, _ = update(state, batches)
    compiled = [record.message for record in caplog.records if "Compiling" in record.message]
    assert sum("accumulate" in message for message in compiled) == 1
    assert sum("apply" in message for message in compiled) == 1


def test_a_value_model_without_an_optimizer_is_refused():
    update = make_update(CONFIG, PPO, optax.sgd(0.1))
    state = init_state(PARAMS, optax.sgd(0.1), HEAD, optax.sgd(0.1))
    with pytest.raises(ValueError, match="a value model and an optimizer for it, or neither"):
        update(state, pack(samples(), [SHAPE]))
