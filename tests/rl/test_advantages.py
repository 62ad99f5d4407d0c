import jax
import numpy as np
import pytest

from searchrl_jax.rl.advantages import ADVANTAGES, countable, to_tokens, whiten, zero_variance_groups

NAMES = (
    "monte_carlo",
    "group_based",
    "group_based_per_turn",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "grpo_passk",
    "gpg",
)
PER_TURN = ("monte_carlo", "reinforce_pp", "group_based_per_turn")
WITHIN_GROUP = ("group_based", "group_based_per_turn", "rloo", "opo", "grpo_passk", "gpg")
NORMALIZED_BY_DEFAULT = {
    "monte_carlo",
    "group_based",
    "group_based_per_turn",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "grpo_passk",
}
EPSILON = 1e-6

# Groups: ordinary; nDCG and penalties; all equal; with holes; one valid alone (the last); none valid.
REWARDS = np.array(
    [
        [0.0, 1.0, 0.5, 0.25],
        [-1.0, 0.6309, -1.0, 0.0],
        [0.7, 0.7, 0.7, 0.7],
        [0.3, 9.0, 1.0, 0.1],
        [5.0, 6.0, 7.0, 0.4],
        [1.0, 0.0, 1.0, 0.0],
    ]
)
IS_VALID = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], bool)
TOKENS = np.array([[3, 90, 12, 40], [1, 7, 2, 30], [5, 5, 9, 1], [10, 99, 20, 30], [7, 8, 9, 10], [4, 4, 4, 4]])

RNG = np.random.default_rng(5)
TURN_REWARDS = np.round(RNG.normal(size=(6, 4, 3)), 2)
# Trajectories of 1, 2 and 3 turns, so that the third turn of a group has one, two or no players.
TURNS_PLAYED = np.array([[1, 2, 3, 3], [3, 3, 3, 2], [1, 1, 2, 1], [3, 1, 2, 3], [3, 2, 1, 3], [1, 2, 3, 1]])
IS_TURN = np.arange(3) < TURNS_PLAYED[..., None]
TURN_TOKENS = RNG.integers(1, 40, size=(6, 4, 3))


# The oracle: lists of (position, number) and loops.


def mean_and_std(values, weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    total = sum(weights)
    mean = sum(w * v for v, w in zip(values, weights, strict=True)) / total if total else 0.0
    squares = sum(w * (v - mean) ** 2 for v, w in zip(values, weights, strict=True))
    return mean, (squares / (total - 1)) ** 0.5 if total > 1 else 0.0


def is_flat(values):
    return len(values) < 2 or max(values) - min(values) < 1e-9


def loop_group(name, values, lengths, normalize, alpha):
    """Advantages of the valid rollouts of one group."""
    if is_flat(values):
        return [0.0] * len(values)
    mean, std = mean_and_std(values)
    if name in ("group_based", "group_based_per_turn", "reinforce_pp_baseline"):
        out = [v - mean for v in values]
    elif name == "rloo":
        out = [v - (sum(values) - v) / (len(values) - 1) for v in values]
    elif name == "opo":
        baseline = sum(n * v for n, v in zip(lengths, values, strict=True)) / sum(lengths)
        out = [v - baseline for v in values]
    elif name == "grpo_passk":
        best = max(range(len(values)), key=lambda i: values[i])
        second = max(v for i, v in enumerate(values) if i != best)
        out = [values[i] - second if i == best else 0.0 for i in range(len(values))]
    elif name == "gpg":
        out = [alpha * (v - mean) for v in values]
    if normalize and name != "reinforce_pp_baseline":
        out = [a / (std + EPSILON) for a in out]
    return out


def loop_whiten(values, weights):
    if is_flat(values):
        return [0.0] * len(values)
    mean, std = mean_and_std(values, weights)
    return [(v - mean) / (std + EPSILON) for v in values]


def loop_advantages(name, rewards, is_valid, tokens, normalize):
    """[P, G] advantages of trajectories."""
    out = np.zeros(rewards.shape)
    groups = [[(p, g) for g in range(rewards.shape[1]) if is_valid[p, g]] for p in range(rewards.shape[0])]
    everyone = [at for group in groups for at in group]
    in_flat = sum(len(group) for group in groups if is_flat([rewards[at] for at in group]))
    alpha = len(everyone) / (len(everyone) - in_flat) if len(everyone) > in_flat else 1.0
    if name in ("monte_carlo", "reinforce_pp"):
        for at in everyone:
            out[at] = rewards[at]
    else:
        for group in groups:
            values = [rewards[at] for at in group]
            for at, a in zip(
                group, loop_group(name, values, [tokens[at] for at in group], normalize, alpha), strict=True
            ):
                out[at] = a
    if normalize and name in ("monte_carlo", "reinforce_pp", "reinforce_pp_baseline"):
        weights = [1.0 if name == "monte_carlo" else float(tokens[at]) for at in everyone]
        for at, a in zip(everyone, loop_whiten([out[at] for at in everyone], weights), strict=True):
            out[at] = a
    return out


def loop_turns(name, turn_rewards, is_valid, is_turn, tokens, discount, normalize):
    """[P, G, R] advantages of turns."""
    prompts, rollouts, turns = turn_rewards.shape
    returns, out = np.zeros(turn_rewards.shape), np.zeros(turn_rewards.shape)
    for p, g in np.ndindex(prompts, rollouts):
        played = [r for r in range(turns) if is_turn[p, g, r] and is_valid[p, g]]
        for i, r in enumerate(played):
            returns[p, g, r] = sum(discount ** (k - i) * turn_rewards[p, g, played[k]] for k in range(i, len(played)))
    counted = [(p, g, r) for p, g, r in np.ndindex(*out.shape) if is_turn[p, g, r] and is_valid[p, g]]
    if name == "group_based_per_turn":
        for p in range(prompts):
            for r in range(turns):
                group = [at for at in counted if at[0] == p and at[2] == r]
                values = [returns[at] for at in group]
                for at, a in zip(group, loop_group(name, values, None, normalize, None), strict=True):
                    out[at] = a
        return out
    values = [returns[at] for at in counted]
    if normalize:
        values = loop_whiten(values, [1.0 if name == "monte_carlo" else float(tokens[at]) for at in counted])
    for at, a in zip(counted, values, strict=True):
        out[at] = a
    return out


def test_the_table_has_the_nine_names():
    assert sorted(ADVANTAGES) == sorted(NAMES)


VALID = {
    "all": np.ones_like(IS_VALID),
    "none": np.zeros_like(IS_VALID),
    "holes": IS_VALID,
    "last only": np.arange(4) == np.full((6, 1), 3),
}


@pytest.mark.parametrize("valid", VALID.values(), ids=VALID)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_loop(name, normalize, valid):
    result = ADVANTAGES[name](REWARDS, is_valid=valid, action_tokens=TOKENS, normalize=normalize)
    expected = loop_advantages(name, REWARDS, valid, TOKENS, normalize)
    assert result.shape == REWARDS.shape and result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(result)[~valid], 0.0)


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", PER_TURN)
def test_per_turn_equals_a_loop(name, normalize, discount):
    result = ADVANTAGES[name](
        REWARDS,
        is_valid=IS_VALID,
        turn_rewards=np.where(IS_TURN, TURN_REWARDS, np.nan),  # what was not played is not read
        is_turn=IS_TURN,
        action_tokens=TURN_TOKENS,
        discount=discount,
        normalize=normalize,
    )
    expected = loop_turns(name, TURN_REWARDS, IS_VALID, IS_TURN, TURN_TOKENS, discount, normalize)
    assert result.shape == TURN_REWARDS.shape
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(result)[~(IS_TURN & IS_VALID[..., None])], 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_normalisation_defaults_to_the_source_s(name):
    given = {"is_valid": IS_VALID, "action_tokens": TOKENS}
    default = ADVANTAGES[name](REWARDS, **given)
    np.testing.assert_array_equal(default, ADVANTAGES[name](REWARDS, **given, normalize=name in NORMALIZED_BY_DEFAULT))
    assert not np.array_equal(default, ADVANTAGES[name](REWARDS, **given, normalize=name not in NORMALIZED_BY_DEFAULT))


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(PER_TURN)))
def test_the_others_judge_the_trajectory_whatever_its_turns(name):
    tokens = np.where(IS_TURN, TURN_TOKENS, 0)
    result = ADVANTAGES[name](REWARDS, turn_rewards=TURN_REWARDS, is_turn=IS_TURN, action_tokens=tokens)
    np.testing.assert_array_equal(result, ADVANTAGES[name](REWARDS, action_tokens=tokens.sum(2)))


# Faults


def test_one_success_among_equals_is_not_thrown_far():  # fault 12
    rewards = np.array([[0.35] * 7 + [1.0]], np.float32)
    result = np.asarray(ADVANTAGES["group_based"](rewards))
    np.testing.assert_allclose(result[0], [-0.35355] * 7 + [2.47487], atol=1e-4)
    # The list of faults has -0.378 and 2.646, in deviations with ddof 0.
    np.testing.assert_allclose(result[0] * np.sqrt(8 / 7), [-0.378] * 7 + [2.646], atol=5e-4)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", WITHIN_GROUP)
@pytest.mark.parametrize("rewards", [[0.7] * 8, [0.1] * 7 + [0.1 + 1e-8], [-1.0] * 8, [0.0] * 8, [1e30] * 8])
def test_equal_rewards_have_exactly_no_advantage(name, normalize, rewards):  # fault 12
    tokens = np.arange(1, 9)[None]
    result = ADVANTAGES[name](np.array([rewards], np.float32), action_tokens=tokens, normalize=normalize)
    np.testing.assert_array_equal(result, 0.0)


@pytest.mark.parametrize("name", ["monte_carlo", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_of_equal_rewards_whitens_to_exactly_zero(name):  # fault 12
    result = ADVANTAGES[name](np.full(REWARDS.shape, 0.7), action_tokens=TOKENS)
    np.testing.assert_array_equal(result, 0.0)


@pytest.mark.parametrize("name", WITHIN_GROUP)
def test_residue_of_float32_arithmetic_is_no_spread(name):  # fault 12
    residue = np.float32([0.7, np.nextafter(np.float32(0.7), np.float32(1)), 0.1 * 7, 0.3 + 0.4] * 2)
    assert len(set(residue.tolist())) > 1
    np.testing.assert_array_equal(ADVANTAGES[name](residue[None], normalize=True), 0.0)


def test_a_small_difference_is_a_spread():
    result = np.asarray(ADVANTAGES["group_based"](np.array([[0.5] * 7 + [0.5001]])))
    np.testing.assert_allclose(result[0], [-0.35355] * 7 + [2.47487], rtol=0.05)


@pytest.mark.parametrize("name", ["group_based", "rloo"])
def test_a_group_of_one_has_no_advantage(name):  # fault 13; row 4 of REWARDS is one for every name
    np.testing.assert_array_equal(ADVANTAGES[name](np.array([[0.8]])), [[0.0]])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("normalize", [True, False])
def test_padding_is_in_no_baseline(name, normalize):  # fault 14
    is_rollout = np.arange(4) < np.full((6, 1), 2)
    padded = np.where(is_rollout, REWARDS, 0.0)
    result = np.asarray(ADVANTAGES[name](padded, is_valid=is_rollout, action_tokens=TOKENS, normalize=normalize))
    unpadded = loop_advantages(name, REWARDS[:, :2], np.ones((6, 2), bool), TOKENS[:, :2], normalize)
    np.testing.assert_allclose(result[:, :2], unpadded, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(result[:, 2:], 0.0)


def test_the_mean_of_a_padded_group_is_that_of_its_rollouts():  # fault 14, its numbers
    rewards, is_valid = np.array([[1.0, 0.0] + [0.0] * 6]), np.array([[1, 1] + [0] * 6], bool)
    result = ADVANTAGES["group_based"](rewards, is_valid=is_valid, normalize=False)
    np.testing.assert_array_equal(result, [[0.5, -0.5] + [0.0] * 6])


@pytest.mark.parametrize("missing", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_reward_excludes_its_rollout_and_no_other(name, missing):  # fault 15
    rewards = REWARDS.copy()
    rewards[0] = [1.0, missing, 0.0, 0.5]
    result = ADVANTAGES[name](rewards)
    masked = ADVANTAGES[name](np.where(np.isfinite(rewards), rewards, 0.0), is_valid=np.isfinite(rewards))
    assert np.isfinite(result).all()
    assert float(result[0, 1]) == 0.0
    np.testing.assert_array_equal(result, masked)
    np.testing.assert_array_equal(countable(rewards), np.isfinite(rewards))


@pytest.mark.parametrize("name", PER_TURN)
def test_a_missing_turn_reward_excludes_the_whole_rollout(name):  # fault 15
    broken = TURN_REWARDS.copy()
    broken[0, 3, 1] = np.nan
    valid = np.ones((6, 4), bool)
    valid[0, 3] = False
    result = ADVANTAGES[name](REWARDS, turn_rewards=broken, is_turn=IS_TURN)
    np.testing.assert_array_equal(
        result, ADVANTAGES[name](REWARDS, is_valid=valid, turn_rewards=TURN_REWARDS, is_turn=IS_TURN)
    )


def test_each_turn_carries_the_reward_at_the_end():  # fault 16
    turn_rewards = np.zeros((1, 2, 3))
    turn_rewards[0, 0, 2] = 1.0
    trajectory = np.asarray(ADVANTAGES["group_based"](turn_rewards.sum(2)))
    turns = np.asarray(ADVANTAGES["group_based_per_turn"](turn_rewards.sum(2), turn_rewards=turn_rewards))
    np.testing.assert_allclose(turns, np.repeat(trajectory[..., None], 3, axis=2), rtol=1e-6)
    tokens = to_tokens(
        turns.reshape(2, 3), np.zeros((1, 5), int), np.array([[1, 0, 1, 0, 1]], bool), turn=np.array([[0, 9, 1, 9, 2]])
    )
    np.testing.assert_allclose(tokens[0], trajectory[0, 0] * np.array([1, 0, 1, 0, 1]), rtol=1e-6)


# Special cases


def test_rloo_is_group_based_without_std_scaled_up():
    plain = ADVANTAGES["group_based"](REWARDS, normalize=False)
    np.testing.assert_allclose(ADVANTAGES["rloo"](REWARDS), 4 / 3 * np.asarray(plain), rtol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_opo_with_equal_lengths_is_group_based(normalize):
    expected = ADVANTAGES["group_based"](REWARDS, is_valid=IS_VALID, normalize=normalize)
    for tokens in (None, np.full((6, 4), 17)):
        result = ADVANTAGES["opo"](REWARDS, is_valid=IS_VALID, action_tokens=tokens, normalize=normalize)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_monte_carlo_is_reinforce_pp_when_turns_are_equally_long():
    given = {"is_valid": IS_VALID, "turn_rewards": TURN_REWARDS, "is_turn": IS_TURN, "discount": 0.9}
    np.testing.assert_allclose(
        ADVANTAGES["monte_carlo"](REWARDS, **given), ADVANTAGES["reinforce_pp"](REWARDS, **given), rtol=1e-5
    )


def test_gpg_makes_up_for_the_groups_that_say_nothing():
    rewards = np.array([[1.0, 0, 1, 0], [0.5] * 4, [-1.0] * 4, [0.0] * 4, [1.0] * 4, [0.25] * 4])  # B 24, M 20: alpha 6
    np.testing.assert_allclose(ADVANTAGES["gpg"](rewards)[0], [3.0, -3.0, 3.0, -3.0])
    # How many rewards are zero doesn't matter, and dropped groups are not made up for again.
    np.testing.assert_allclose(ADVANTAGES["gpg"](rewards * [[1], [0], [0], [0], [0], [0]])[0], [3.0, -3.0, 3.0, -3.0])
    is_kept = np.broadcast_to(~zero_variance_groups(rewards)[:, None], rewards.shape)
    np.testing.assert_allclose(ADVANTAGES["gpg"](rewards, is_valid=is_kept)[0], [0.5, -0.5, 0.5, -0.5])


def test_passk_praises_the_best_alone_and_no_tie():
    rewards = np.array([[0.1, 0.9, 0.4, 0.4], [1.0, 0.0, 1.0, 0.0], [-1.0, -1.0, -0.5, -1.0]] * 2)
    result = np.asarray(ADVANTAGES["grpo_passk"](rewards, normalize=False))
    np.testing.assert_allclose(result, [[0, 0.5, 0, 0], [0, 0, 0, 0], [0, 0, 0.5, 0]] * 2, rtol=1e-6)


# Invariances


@pytest.mark.parametrize("name", NAMES)
def test_order_doesn_t_matter(name):
    given = dict(rewards=REWARDS, is_valid=IS_VALID, action_tokens=TOKENS)
    prompts, rollouts = np.array([3, 0, 5, 1, 4, 2]), np.array([2, 0, 3, 1])
    shuffled = {key: x[prompts][:, rollouts] for key, x in given.items()}
    result = np.asarray(ADVANTAGES[name](**given))[prompts][:, rollouts]
    np.testing.assert_allclose(ADVANTAGES[name](**shuffled), result, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITHIN_GROUP)
def test_shifted_rewards_have_the_same_advantages(name):
    shifted = ADVANTAGES[name](REWARDS + 4.0, is_valid=IS_VALID, action_tokens=TOKENS)
    np.testing.assert_allclose(
        shifted, ADVANTAGES[name](REWARDS, is_valid=IS_VALID, action_tokens=TOKENS), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_masked_is_not_read(name):
    poisoned = np.where(IS_VALID, REWARDS, 1e6)
    tokens = np.where(IS_VALID, TOKENS, 10**6)
    np.testing.assert_array_equal(
        ADVANTAGES[name](poisoned, is_valid=IS_VALID, action_tokens=tokens),
        ADVANTAGES[name](REWARDS, is_valid=IS_VALID, action_tokens=TOKENS),
    )


def test_whitened_tokens_have_mean_zero_and_deviation_one():
    result = np.asarray(ADVANTAGES["reinforce_pp"](REWARDS, is_valid=IS_VALID, action_tokens=TOKENS))
    tokens = np.repeat(result[IS_VALID], TOKENS[IS_VALID])
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_whiten_is_safe_under_the_mask():
    where = np.array([1, 1, 0, 1], bool)
    x = np.array([1.0, 2.0, np.nan, 4.0], np.float32)
    value, gradient = jax.value_and_grad(lambda x: whiten(x, where)[0])(x)
    assert np.isfinite(value) and np.isfinite(gradient).all() and gradient[2] == 0.0


# The rest of the surface


def test_zero_variance_groups():
    np.testing.assert_array_equal(zero_variance_groups(REWARDS, IS_VALID), [0, 0, 1, 0, 1, 1])
    np.testing.assert_array_equal(zero_variance_groups(REWARDS), [0, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(zero_variance_groups(np.array([[0.5, np.nan, 0.5]])), [1])


def test_tokens_take_the_advantage_of_their_trajectory_in_any_layout():
    advantage = np.array([1.0, 2.0, 3.0])
    trajectory = np.array([[0, 0, 2, 2, -1], [1, 1, 1, 99, 99]])  # two packed in the first row
    is_action = np.array([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]], bool)
    np.testing.assert_array_equal(to_tokens(advantage, trajectory, is_action), [[1, 0, 3, 3, 0], [0, 2, 2, 0, 0]])


def test_to_tokens_wants_turns_for_advantages_per_turn():
    index, mask = np.zeros((1, 2), int), np.ones((1, 2), bool)
    with pytest.raises(ValueError, match="without turn"):
        to_tokens(np.ones((1, 2)), index, mask)
    with pytest.raises(ValueError, match="with turn"):
        to_tokens(np.ones(1), index, mask, turn=index)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rewards": np.zeros(4)}, r"rewards must have shape \[prompts, rollouts\]"),
        ({"is_valid": np.ones((4, 6), bool)}, "is_valid must have shape"),
        ({"turn_rewards": np.zeros((6, 4))}, "turn_rewards must have shape"),
        ({"turn_rewards": np.zeros((4, 6, 3))}, "turn_rewards must have shape"),
        ({"is_turn": IS_TURN}, "give both or neither"),
        ({"turn_rewards": TURN_REWARDS, "is_turn": IS_TURN[..., :2]}, "is_turn must have shape"),
        ({"action_tokens": TURN_TOKENS}, "action_tokens must have shape"),
        ({"turn_rewards": TURN_REWARDS, "action_tokens": TOKENS}, "action_tokens must have shape"),
    ],
)
def test_shapes_that_don_t_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ADVANTAGES["group_based"](**({"rewards": REWARDS} | given))
