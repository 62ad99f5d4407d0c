"""Advantages from the rewards of grouped rollouts: `ADVANTAGES[name](rewards, ...)`.

Every entry of the table takes the same arguments (`AdvantageFunction` describes them), so that a configuration can name
one; the docstring of each formula says which it reads. What they have in common:

* A rollout that is not valid (its tool failed, its row is padding, its reward is NaN) is in no mean, no deviation and
  no count, and its advantage is exactly 0.
* Where rewards have no spread there is nothing to learn: the advantage is exactly 0, and rounding residue is never
  divided by. A group of one is such a group.
* Deviations are unbiased (ddof = 1), and 1e-6 is added before dividing by one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from searchrl_jax.core.masked import masked_mean, masked_std, masked_sum
from searchrl_jax.rl.returns import reward_to_go

EPSILON = 1e-6
# Of the largest magnitude: eight float32 roundings wide, so equal rewards that took different routes through float32
# still count as equal; two nDCG@10 that differ at all differ by far more.
SPREAD_TOLERANCE = 1e-6


class AdvantageFunction(Protocol):
    def __call__(
        self,
        rewards: Float[Array, "P G"],
        *,
        is_valid: Bool[Array, "P G"] | None = None,
        turn_rewards: Float[Array, "P G R"] | None = None,
        is_turn: Bool[Array, "P G R"] | None = None,
        action_tokens: Int[Array, "P G"] | Int[Array, "P G R"] | None = None,
        discount: float = 1.0,
        normalize: bool | None = None,
    ) -> Float[Array, "P G"] | Float[Array, "P G R"]:
        """Advantage of each rollout, or of each of its turns.

        Args:
            rewards: of the whole trajectory; float, so that a fractional nDCG survives.
            is_valid: the rollouts that count; all if None. A rollout with a reward that is not finite never counts.
            turn_rewards: the rewards of each turn. `monte_carlo`, `reinforce_pp` and `group_based_per_turn` then read
                these in place of `rewards`; the others don't. If None, the trajectory is taken for one turn.
            is_turn: the turns that were played; all if None. What stands elsewhere is not read.
            action_tokens: number of action tokens of each rollout, [P, G], or with `turn_rewards` of each turn,
                [P, G, R]; all equally long if None.
            discount: in [0, 1], per turn; read where turn rewards are.
            normalize: divide by a standard deviation (the three batch-wide methods: subtract the mean, too). None: as
                the method's source does; its docstring says which.

        Returns:
            [P, G, R] if `turn_rewards` were given to one of the three that read them, else [P, G]. Zero where not
            valid.

        Raises:
            ValueError: shapes that don't fit together.
        """


@dataclass(frozen=True)
class Groups:
    """A batch of groups with its defaults filled in; every number where `is_valid` or `is_turn` is false is 0.

    rewards: of the trajectory.
    is_valid: the rollouts that count.
    tokens: action tokens of the trajectory.
    turn_rewards: of each turn; those of the trajectory as its one turn, if there are no others.
    is_turn: the turns that were played in rollouts that count.
    turn_tokens: action tokens of the turn.
    discount: per turn.
    """

    rewards: Float[Array, "P G"]
    is_valid: Bool[Array, "P G"]
    tokens: Float[Array, "P G"]
    turn_rewards: Float[Array, "P G R"]
    is_turn: Bool[Array, "P G R"]
    turn_tokens: Float[Array, "P G R"]
    discount: float


def monte_carlo(groups: Groups, normalize: bool) -> Float[Array, "P G R"]:
    """Return of each turn, without a group's baseline. Normalised by default.

        A_it = R_it = sum_{k>=t} discount^(k-t) r_ik,    normalised: (R_it - mean) / (std + eps)

    with mean and std over the turns of the batch.

    For groups of one, or prompts too different to be each other's baseline. The mean of the batch is then the only
    baseline, so an easy prompt is praised as a whole. Not normalised, it has none, and with rewards >= 0 every action
    is reinforced.

    Source:
        REINFORCE with return-to-go. The published service gives the name only; the formula is deduced from its `gamma`.
    """
    returns = _returns(groups)
    return whiten(returns, groups.is_turn) if normalize else returns


def group_based(groups: Groups, normalize: bool) -> Float[Array, "P G"]:
    """Reward against the mean of its group, in its standard deviations (GRPO). Normalised by default.

        A_i = (r_i - mean_G) / (std_G + eps),    not normalised (Dr. GRPO): A_i = r_i - mean_G

    The deviation gives nearly solved and nearly hopeless prompts as much weight as the others: more signal from rare
    successes, and more noise.

    Source:
        arXiv:2402.03300, section 4.1.2; arXiv:2503.20783.
    """
    centred = _centred(groups.rewards, groups.is_valid)
    return _over_std(centred, groups.rewards, groups.is_valid) if normalize else centred


def group_based_per_turn(groups: Groups, normalize: bool) -> Float[Array, "P G R"]:
    """`group_based`, turn by turn, on the returns from each turn. Normalised by default.

        A_it = (R_it - mean_j R_jt) / (std_j R_jt + eps) over the rollouts j of the group that played turn t

    With a reward at the end only, discount 1 and equally many turns, each turn has the trajectory's advantage. A turn
    that one rollout alone has played has advantage 0: nothing to compare it with.

    Source:
        The published service gives the name and its pairing with a reward per turn; return-to-go, not the bare reward
        of the turn, so that an early search is credited for what was found with it later.
    """
    returns = _returns(groups)
    centred = _centred(returns, groups.is_turn)
    return _over_std(centred, returns, groups.is_turn) if normalize else centred


def rloo(groups: Groups, normalize: bool) -> Float[Array, "P G"]:
    """Reward against the mean of the *other* rollouts of its group. Not normalised by default.

        A_i = r_i - sum_{j != i} r_j / (G - 1) = G / (G - 1) * (r_i - mean_G),    normalised: divided by (std_G + eps)

    with G the number of valid rollouts. The baseline doesn't contain r_i, so the gradient is unbiased for any group
    size.

    Source:
        Ahmadian et al. 2024, arXiv:2402.14740, section 3.2.
    """
    count = masked_sum(groups.is_valid, groups.is_valid, 1, keepdims=True)
    left_out = _centred(groups.rewards, groups.is_valid) * count / jnp.maximum(count - 1.0, 1.0)
    return _over_std(left_out, groups.rewards, groups.is_valid) if normalize else left_out


def reinforce_pp(groups: Groups, normalize: bool) -> Float[Array, "P G R"]:
    """Return of each turn, whitened over the action tokens of the batch. Normalised by default.

        A_it = (R_it - mean_B) / (std_B + eps),    R_it = sum_{k>=t} discount^(k-t) r_ik;    not normalised: R_it

    mean_B and std_B are over all action tokens, so a turn counts there by its number of them. This is what tells it
    from `monte_carlo`. The paper's penalty for distance from a reference is the caller's to put into the rewards.

    Source:
        Hu et al. 2025, arXiv:2501.03262.
    """
    returns = _returns(groups)
    return whiten(returns, groups.is_turn, weight=groups.turn_tokens) if normalize else returns


def reinforce_pp_baseline(groups: Groups, normalize: bool) -> Float[Array, "P G"]:
    """Reward against the mean of its group, whitened over the action tokens of the batch. Normalised by default.

        a_i = r_i - mean_G,    A_i = (a_i - mean_B) / (std_B + eps);    not normalised: a_i

    mean_B and std_B are over all action tokens: a trajectory counts there by its number of them. One deviation for the
    batch leaves hard and easy prompts their weights. mean_B is not 0 if lengths differ, so a group without spread gets
    -mean_B / (std_B + eps) unless its rollouts are masked (`zero_variance_groups`).

    Source:
        Hu et al. 2025, arXiv:2501.03262.
    """
    centred = _centred(groups.rewards, groups.is_valid)
    return whiten(centred, groups.is_valid, weight=groups.tokens) if normalize else centred


def opo(groups: Groups, normalize: bool) -> Float[Array, "P G"]:
    """Reward against the length-weighted mean of its group. Not normalised by default.

        A_i = r_i - b,    b = sum_j l_j r_j / sum_j l_j,    normalised: divided by (std_G + eps)

    with l the number of action tokens. It is the baseline of least gradient variance if the squared gradient grows as
    the length does, derived for exact on-policy updates. With equal lengths it is `group_based` without its deviation.

    Source:
        Hao et al. 2025, arXiv:2505.23585.
    """
    baseline = masked_mean(groups.rewards, groups.is_valid, 1, weight=groups.tokens, keepdims=True)
    centred = jnp.where(_has_spread(groups.rewards, groups.is_valid, 1), groups.rewards - baseline, 0.0)
    return _over_std(centred, groups.rewards, groups.is_valid) if normalize else centred


def grpo_passk(groups: Groups, normalize: bool) -> Float[Array, "P G"]:
    """Signal for the best rollout alone: its lead over the second. Normalised by default.

        A_best = (r_best - r_second) / (std_G + eps),  0 for all others;    not normalised: r_best - r_second

    It rewards a group for its best answer, hence exploration. A tie for the best gives 0, so it is silent on a prompt
    solved twice; the advantages of a group don't sum to 0, so nothing is ever discouraged.

    Source:
        Tang et al. 2025, arXiv:2503.19595, as in verl's `grpo_passk`.
    """
    ranked = jnp.where(groups.is_valid, groups.rewards, -jnp.inf)
    is_best = jnp.arange(ranked.shape[1]) == jnp.argmax(ranked, axis=1, keepdims=True)
    second = jnp.max(jnp.where(is_best, -jnp.inf, ranked), axis=1, keepdims=True)
    # Without a second there is no spread either, and the infinite lead is not taken.
    has_lead = (
        is_best
        & _has_spread(groups.rewards, groups.is_valid, 1)
        & (ranked - second > SPREAD_TOLERANCE * jnp.abs(ranked))
    )
    lead = jnp.where(has_lead, groups.rewards - jnp.where(has_lead, second, 0.0), 0.0)
    return _over_std(lead, groups.rewards, groups.is_valid) if normalize else lead


def gpg(groups: Groups, normalize: bool) -> Float[Array, "P G"]:
    """Reward against the mean of its group, scaled up for the groups that say nothing. Not normalised by default.

        A_i = alpha * (r_i - mean_G),    alpha = B / (B - M);    normalised: divided by (std_G + eps)

    with B the number of valid rollouts and M the number of those in groups without spread. (Counting non-zero rewards
    in place of B - M, as some do, is wrong for an nDCG or a penalty.) alpha restores the size of a gradient that is
    averaged over all B rollouts. If the groups without spread are kept out of the batch, mask them here too: alpha is
    then 1, and they are not made up for twice.

    Source:
        Chu et al. 2025, arXiv:2504.02546. Its loss is -log pi * A without a clip: `importance_sampling` on policy.
    """
    informative = groups.is_valid & _has_spread(groups.rewards, groups.is_valid, 1)
    alpha = jnp.sum(groups.is_valid) / jnp.maximum(jnp.sum(informative), 1)
    scaled = alpha * _centred(groups.rewards, groups.is_valid)
    return _over_std(scaled, groups.rewards, groups.is_valid) if normalize else scaled


def _entry(
    formula: Callable[[Groups, bool], Array], *, reads_turns: bool, normalize_by_default: bool
) -> AdvantageFunction:
    """`formula` behind the common arguments: defaults filled in, inputs checked and masked, result masked."""

    def advantages(
        rewards: Float[Array, "P G"],
        *,
        is_valid: Bool[Array, "P G"] | None = None,
        turn_rewards: Float[Array, "P G R"] | None = None,
        is_turn: Bool[Array, "P G R"] | None = None,
        action_tokens: Int[Array, "P G"] | Int[Array, "P G R"] | None = None,
        discount: float = 1.0,
        normalize: bool | None = None,
    ) -> Float[Array, "P G"] | Float[Array, "P G R"]:
        groups = _groups(rewards, is_valid, turn_rewards, is_turn, action_tokens, discount)
        result = formula(groups, normalize_by_default if normalize is None else normalize)
        if not reads_turns:
            return jnp.where(groups.is_valid, result, 0.0)
        result = jnp.where(groups.is_turn, result, 0.0)
        return result[..., 0] if turn_rewards is None else result

    advantages.__name__ = formula.__name__
    advantages.__doc__ = formula.__doc__
    return advantages


ADVANTAGES: Mapping[str, AdvantageFunction] = MappingProxyType(
    {
        "monte_carlo": _entry(monte_carlo, reads_turns=True, normalize_by_default=True),
        "group_based": _entry(group_based, reads_turns=False, normalize_by_default=True),
        "group_based_per_turn": _entry(group_based_per_turn, reads_turns=True, normalize_by_default=True),
        "rloo": _entry(rloo, reads_turns=False, normalize_by_default=False),
        "reinforce_pp": _entry(reinforce_pp, reads_turns=True, normalize_by_default=True),
        "reinforce_pp_baseline": _entry(reinforce_pp_baseline, reads_turns=False, normalize_by_default=True),
        "opo": _entry(opo, reads_turns=False, normalize_by_default=False),
        "grpo_passk": _entry(grpo_passk, reads_turns=False, normalize_by_default=True),
        "gpg": _entry(gpg, reads_turns=False, normalize_by_default=False),
    }
)


def countable(rewards: Float[Array, "P G"], is_valid: Bool[Array, "P G"] | None = None) -> Bool[Array, "P G"]:
    """The rollouts that enter a baseline: valid, and with a finite reward. Mask the loss and count the rest with the
    same array."""
    is_finite = jnp.isfinite(jnp.asarray(rewards, jnp.float32))
    return is_finite if is_valid is None else is_finite & jnp.asarray(is_valid, bool)


def zero_variance_groups(rewards: Float[Array, "P G"], is_valid: Bool[Array, "P G"] | None = None) -> Bool[Array, " P"]:
    """Whether all valid rollouts of a group have the same reward, up to rounding; true also with one of them or none.

    Args:
        rewards: what the task is scored with (nDCG), without a bonus for format or length: shaping gives a hopeless
            group a spread, and keeps it alive to teach the shape alone.
        is_valid: the rollouts that count; all if None.
    """
    return ~_has_spread(jnp.asarray(rewards, jnp.float32), countable(rewards, is_valid), 1)[:, 0]


def whiten(
    x: Float[Array, "*shape"], where: Bool[Array, "*shape"], *, weight: Float[Array, "*shape"] | None = None
) -> Float[Array, "*shape"]:
    """(x - mean) / (std + eps) over all positions of the batch where `where` is true.

    Args:
        x: what to whiten, over the whole global batch: not to be called on a micro-batch.
        where: the positions that count.
        weight: how often each counts: its number of action tokens, say; once each if None.

    Returns:
        Zero where `where` is false, and everywhere if what counts has no spread.
    """
    x = jnp.where(where, jnp.asarray(x, jnp.float32), 0.0)
    counts = where if weight is None else where & (weight > 0)
    mean = masked_mean(x, where, weight=weight)
    std = masked_std(x, where, weight=weight)
    return jnp.where(where & _has_spread(x, counts, None), (x - mean) / (std + EPSILON), 0.0)


def to_tokens(
    advantage: Float[Array, " N"] | Float[Array, "N R"],
    trajectory: Int[Array, "B L"],
    is_action: Bool[Array, "B L"],
    *,
    turn: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L"]:
    """The advantage of each action token: that of its trajectory, or of its turn; zero where `is_action` is false.

    Works for any layout of the rows, packed or split, since each token says whose it is.

    Args:
        advantage: of each trajectory, or of each of its turns; [P, G] flattened to N = P * G.
        trajectory: index in [0, N) of the trajectory that the token belongs to; not read where `is_action` is false.
        is_action: true where the policy chose the token.
        turn: index in [0, R) of the token's turn, with advantages per turn; not read where `is_action` is false.

    Raises:
        ValueError: `turn` is missing for advantages per turn, or given for others.
    """
    if jnp.ndim(advantage) - 1 != (turn is not None):
        raise ValueError(
            f"advantage must have shape [N] without turn or [N, R] with it, got {jnp.shape(advantage)} "
            f"{'without' if turn is None else 'with'} turn; flatten the groups first"
        )
    row = jnp.where(is_action, trajectory, 0)
    per_token = advantage[row] if turn is None else advantage[row, jnp.where(is_action, turn, 0)]
    return jnp.where(is_action, per_token, 0.0)


def _groups(
    rewards: Array,
    is_valid: Array | None,
    turn_rewards: Array | None,
    is_turn: Array | None,
    action_tokens: Array | None,
    discount: float,
) -> Groups:
    rewards = jnp.asarray(rewards, jnp.float32)
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape [prompts, rollouts], got {rewards.shape}")
    _check_shape("is_valid", is_valid, rewards.shape)
    if turn_rewards is None and is_turn is not None:
        raise ValueError("is_turn says which of turn_rewards count, and turn_rewards is None: give both or neither")
    per_turn = rewards[..., None] if turn_rewards is None else jnp.asarray(turn_rewards, jnp.float32)
    if per_turn.ndim != 3 or per_turn.shape[:2] != rewards.shape:
        raise ValueError(
            f"turn_rewards must have shape [prompts, rollouts, turns] for rewards {rewards.shape}, got {per_turn.shape}"
        )
    _check_shape("is_turn", is_turn, per_turn.shape)
    _check_shape("action_tokens", action_tokens, rewards.shape if turn_rewards is None else per_turn.shape)

    played = jnp.ones(per_turn.shape, bool) if is_turn is None else jnp.asarray(is_turn, bool)
    valid = countable(rewards, is_valid) & jnp.all(jnp.isfinite(per_turn) | ~played, axis=2)
    played = played & valid[..., None]
    tokens = (
        jnp.ones(per_turn.shape)
        if action_tokens is None
        else jnp.asarray(action_tokens, jnp.float32).reshape(per_turn.shape)
    )
    turn_tokens = jnp.where(played, tokens, 0.0)
    return Groups(
        rewards=jnp.where(valid, rewards, 0.0),
        is_valid=valid,
        tokens=jnp.sum(turn_tokens, axis=2),
        turn_rewards=jnp.where(played, per_turn, 0.0),
        is_turn=played,
        turn_tokens=turn_tokens,
        discount=discount,
    )


def _returns(groups: Groups) -> Array:
    """Return of each turn: reward_to_go with trajectories for rows and turns for columns."""
    turns = groups.is_turn.shape[2]
    rows = groups.turn_rewards.reshape(-1, turns), groups.is_turn.reshape(-1, turns)
    return reward_to_go(*rows, discount=groups.discount).reshape(groups.is_turn.shape)


def _check_shape(name: str, array: Array | None, expected: tuple[int, ...]) -> None:
    if array is not None and jnp.shape(array) != expected:
        raise ValueError(f"{name} must have shape {expected}, as the rewards that it goes with, got {jnp.shape(array)}")


def _has_spread(x: Array, where: Array, axis: int | None) -> Array:
    """Whether what counts differs by more than rounding along `axis` (kept, with size 1): by its range, which rounds
    only once."""
    high = jnp.max(jnp.where(where, x, -jnp.inf), axis=axis, keepdims=True)
    low = jnp.min(jnp.where(where, x, jnp.inf), axis=axis, keepdims=True)
    return high - low > SPREAD_TOLERANCE * jnp.maximum(jnp.abs(high), jnp.abs(low))


def _centred(x: Array, where: Array) -> Array:
    """x minus the mean of its group (axis 1), exactly 0 in a group without spread."""
    return jnp.where(where & _has_spread(x, where, 1), x - masked_mean(x, where, 1, keepdims=True), 0.0)


def _over_std(signal: Array, x: Array, where: Array) -> Array:
    """`signal` in standard deviations of the x of its group (axis 1)."""
    return signal / (masked_std(x, where, 1, keepdims=True) + EPSILON)
