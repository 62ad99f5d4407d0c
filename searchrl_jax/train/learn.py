"""From groups of trajectories to what the learner trains on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from searchrl_jax.config.schema import RLConfig
from searchrl_jax.rl.advantages import ADVANTAGES, to_tokens, whiten, zero_variance_groups
from searchrl_jax.rl.returns import gae
from searchrl_jax.rollout.batch import Sample
from searchrl_jax.rollout.trajectory import Trajectory

Groups = Sequence[Sequence[Trajectory]]

GAE = "gae"
METHODS = (*ADVANTAGES, GAE)
# Their baseline is the batch, none, or the value model, so that a group of equal rewards has something to say.
WITHOUT_GROUP_BASELINE = ("monte_carlo", "reinforce_pp", GAE)

_gae = jax.jit(gae, static_argnames=("discount", "trace"))


@dataclass(frozen=True)
class Batch:
    """A step's rollouts as arrays. Row n = p * G + g of the tables by action token is rollout g of group p; columns are
    the action tokens in order, and a power of two in number, so that few shapes are compiled for.

    Attributes:
        rewards: of the trajectories; 0 where not valid.
        is_valid: rollouts that count: no tool failed, every reward is finite.
        is_flat: groups without variance.
        is_trained: rollouts that the loss is taken over.
        turn_rewards: [P, G, R], 0 where no turn was played.
        is_turn: turns that were played.
        turn_tokens: action tokens of each turn.
        is_action: [N, T], columns that hold an action token.
        turn: turn of the action token.
        behavior_logprob: log-probability under the policy that sampled it.
    """

    rewards: Float[np.ndarray, "P G"]
    is_valid: Bool[np.ndarray, "P G"]
    is_flat: Bool[np.ndarray, " P"]
    is_trained: Bool[np.ndarray, "P G"]
    turn_rewards: Float[np.ndarray, "P G R"]
    is_turn: Bool[np.ndarray, "P G R"]
    turn_tokens: Int[np.ndarray, "P G R"]
    is_action: Bool[np.ndarray, "N T"]
    turn: Int[np.ndarray, "N T"]
    behavior_logprob: Float[np.ndarray, "N T"]

    @property
    def trained_tokens(self) -> Bool[np.ndarray, "N T"]:
        """The action tokens that the loss is taken over."""
        return self.is_action & self.is_trained.reshape(-1, 1)

    @property
    def teaches(self) -> Bool[np.ndarray, " P"]:
        """Groups of which a rollout is trained."""
        return np.asarray(self.is_trained.any(axis=1))


def batch_of(groups: Groups, config: RLConfig) -> Batch:
    """The arrays of `groups`.

    A group without variance is left out of the training by a method whose baseline is the group: it has nothing to say
    there, and would only dilute the mean. It is judged by the rewards of the task, before any penalty and without what
    malformed turns are charged; by `group_based_per_turn` by what each turn is paid, and by `grpo_passk` by whether one
    rollout leads. (For `gpg` the share of such groups enters through the mean over those that are left.)

    Raises:
        ValueError: a trajectory's turn rewards don't fit its turns.
    """
    flat = [trajectory for group in groups for trajectory in group]
    by_turn = [t.rewards_by_turn for t in flat]
    shape = (len(groups), len(groups[0]))
    turns = max([1, *map(len, by_turn)])
    width = 1 << max(max(t.num_action_tokens for t in flat) - 1, 0).bit_length()
    turn_rewards = np.zeros((len(flat), turns), np.float32)
    turn_tokens = np.zeros((len(flat), turns), np.int32)
    is_action = np.zeros((len(flat), width), bool)
    turn = np.zeros((len(flat), width), np.int32)
    behavior_logprob = np.zeros((len(flat), width), np.float32)
    for n, (trajectory, paid) in enumerate(zip(flat, by_turn, strict=True)):
        count = trajectory.num_action_tokens
        turn_rewards[n, : len(paid)] = paid
        is_action[n, :count] = True
        turn[n, :count] = trajectory.turn[trajectory.is_action]
        behavior_logprob[n, :count] = trajectory.behavior_logprob[trajectory.is_action]
        turn_tokens[n] = np.bincount(turn[n, :count], minlength=turns)
    is_turn = np.array([np.arange(turns) < len(paid) for paid in by_turn])
    rewards = np.array([0.0 if t.reward is None else t.reward for t in flat], np.float32)
    is_valid = np.array([t.is_valid for t in flat]) & np.isfinite(turn_rewards).all(axis=1)
    table = (*shape, turns)
    batch = Batch(
        rewards=np.where(is_valid, rewards, 0).reshape(shape),
        is_valid=is_valid.reshape(shape),
        is_flat=np.zeros(len(groups), bool),
        is_trained=is_valid.reshape(shape),
        turn_rewards=np.where(is_valid[:, None], turn_rewards, 0).reshape(table),
        is_turn=is_turn.reshape(table),
        turn_tokens=turn_tokens.reshape(table),
        is_action=is_action,
        turn=turn,
        behavior_logprob=behavior_logprob,
    )
    of_task = np.array([t.task_reward for t in flat], np.float32).reshape(shape)
    is_flat = np.asarray(zero_variance_groups(jnp.asarray(of_task), jnp.asarray(batch.is_valid)))
    if config.advantage_method == "group_based_per_turn":  # equal in sum, a group may differ in its turns
        is_flat = ~np.any(_estimates(batch, config, normalize=False), axis=(1, 2))
    if config.advantage_method == "grpo_passk":  # with a tie for the best, a group may differ in the others
        is_flat = is_flat | ~np.any(_estimates(batch, config, normalize=False), axis=1)
    keeps = config.advantage_method in WITHOUT_GROUP_BASELINE
    return replace(batch, is_flat=is_flat, is_trained=batch.is_valid & (keeps | ~is_flat[:, None]))


def _estimates(
    batch: Batch, config: RLConfig, *, normalize: bool | None, turn_penalty: np.ndarray | float = 0.0
) -> Float[np.ndarray, "P G"] | Float[np.ndarray, "P G R"]:
    charged = np.broadcast_to(turn_penalty, batch.turn_rewards.shape)
    found = ADVANTAGES[config.advantage_method](
        jnp.asarray(batch.rewards - charged.sum(axis=2)),
        is_valid=jnp.asarray(batch.is_trained),
        turn_rewards=jnp.asarray(batch.turn_rewards - charged),
        is_turn=jnp.asarray(batch.is_turn),
        action_tokens=jnp.asarray(batch.turn_tokens),
        discount=config.gamma,
        normalize=normalize,
    )
    return np.asarray(found)


def group_advantages(
    batch: Batch, config: RLConfig, penalty: Float[np.ndarray, "N T"] | None = None
) -> tuple[Float[np.ndarray, "N T"], Float[np.ndarray, " n"]]:
    """The advantage of each action token, and the estimates it is made of: of each trained rollout, or of its turns.

    Args:
        penalty: what each action token costs of the reward of its turn.
    """
    turn_penalty: np.ndarray = np.zeros((len(batch.is_action), batch.turn_tokens.shape[2]), np.float32)
    if penalty is not None:
        row, column = np.nonzero(batch.is_action)
        np.add.at(turn_penalty, (row, batch.turn[row, column]), penalty[row, column])
    turn_penalty = turn_penalty.reshape(batch.turn_tokens.shape)
    found = _estimates(batch, config, normalize=config.advantage_normalization, turn_penalty=turn_penalty)
    is_per_turn = found.ndim == 3
    trajectory = np.broadcast_to(np.arange(len(batch.is_action))[:, None], batch.is_action.shape)
    per_token = to_tokens(
        jnp.asarray(found.reshape(-1, *found.shape[2:])),
        jnp.asarray(trajectory),
        jnp.asarray(batch.trained_tokens),
        turn=jnp.asarray(batch.turn) if is_per_turn else None,
    )
    return np.asarray(per_token), found[
        batch.is_turn & batch.is_trained[..., None] if is_per_turn else batch.is_trained
    ]


def gae_advantages(
    batch: Batch,
    config: RLConfig,
    value: Float[np.ndarray, "N T"],
    penalty: Float[np.ndarray, "N T"] | None = None,
) -> tuple[Float[np.ndarray, "N T"], Float[np.ndarray, "N T"]]:
    """Advantage and value target of each action token. The advantages are whitened over the batch's tokens unless the
    configuration says otherwise; the targets never are.

    A turn is paid at its last token.

    Args:
        value: the value model's estimate before each token, at the start of the step.
        penalty: what each action token costs of its reward.
    """
    acts = batch.trained_tokens
    next_turn = np.pad(np.where(batch.is_action, batch.turn, -1), ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
    is_last = batch.is_action & (next_turn != batch.turn)
    by_turn = batch.turn_rewards.reshape(len(acts), -1)
    reward = np.where(is_last, np.take_along_axis(by_turn, batch.turn, axis=1), 0.0)
    if penalty is not None:
        reward = reward - penalty
    found = _gae(
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(value),
        jnp.asarray(acts),
        discount=config.gamma,
        trace=config.gae_lambda,
    )
    target = np.where(acts, np.asarray(found) + value, 0.0)
    if config.advantage_normalization is not False:
        found = whiten(found, jnp.asarray(acts))
    return np.asarray(found), target


@dataclass(frozen=True)
class Part:
    """A sample, and whose action tokens it holds: in the tables of `Batch`, those from column `first` on of row
    `rollout`."""

    sample: Sample
    rollout: int
    first: int = 0

    @property
    def columns(self) -> slice:
        """The sample's columns of a table."""
        return slice(self.first, self.first + int(self.sample.is_action.sum()))


def parts_of(groups: Groups, is_trained: Bool[np.ndarray, "P G"]) -> list[Part]:
    """The rows of the trained rollouts, each up to its last action token, without advantages yet.

    A rollout of several rows counts as one of the same tokens in one row would: each of its action tokens is in one of
    them.

    Raises:
        ValueError: a rollout has no behaviour log-probabilities, or they are 0 in all rollouts (one may be sure of all
            its tokens); without them nothing would be learnt, silently.
    """
    parts = []
    is_any_uncertain = False
    for n, trajectory in enumerate(trajectory for group in groups for trajectory in group):
        if not is_trained.flat[n]:
            continue
        logprob = trajectory.behavior_logprob[trajectory.is_action]
        if not np.isfinite(logprob).all():
            raise ValueError(
                f"rollout {trajectory.uid} of task {trajectory.task_id!r}: expected the log-probabilities of its "
                "action tokens, got some that are no numbers; sample it with the engine"
            )
        is_any_uncertain |= bool(logprob.any())
        for row in trajectory.rows:
            sample = Sample(
                token_ids=trajectory.token_ids[row],
                is_action=trajectory.is_action[row],
                behavior_logprob=trajectory.behavior_logprob[row],
                advantage=np.zeros(row.stop - row.start, np.float32),
                trajectory_tokens=trajectory.num_action_tokens,
            )
            parts.append(Part(sample, n, first=int(trajectory.is_action[: row.start].sum())))
    if parts and not is_any_uncertain:
        raise ValueError(
            f"expected the log-probabilities of the action tokens of {len(parts)} rows, got 0 in all; sample them with "
            "the engine, at a temperature and top-p that leave a choice"
        )
    return parts


def to_table(
    parts: Sequence[Part], values: Sequence[Float[np.ndarray, " n"]], shape: tuple[int, ...]
) -> Float[np.ndarray, "N T"]:
    """Numbers of each part's action tokens as a table of `shape`, 0 elsewhere."""
    table = np.zeros(shape, np.float32)
    for part, numbers in zip(parts, values, strict=True):
        table[part.rollout, part.columns] = numbers
    return table


def with_tables(part: Part, tables: dict[str, Float[np.ndarray, "N T"]]) -> Sample:
    """The part's sample, with its share of each table in the field of that name."""
    spread: dict[str, Any] = {}
    for name, table in tables.items():
        spread[name] = np.zeros(len(part.sample.is_action), np.float32)
        spread[name][part.sample.is_action] = table[part.rollout, part.columns]
    return replace(part.sample, **spread)


def split_minibatches(
    samples: Sequence[Sample], rollouts: Sequence[int], count: int, rng: np.random.Generator
) -> list[list[Sample]]:
    """`samples` dealt at random into at most `count` minibatches, none empty: as many rollouts in each, or one more.

    Args:
        rollouts: whose row each sample is; the rows of one stay together.
    """
    of_rollout: dict[int, list[Sample]] = {}
    for sample, rollout in zip(samples, rollouts, strict=True):
        of_rollout.setdefault(rollout, []).append(sample)
    rows = list(of_rollout.values())
    order = rng.permutation(len(rows))
    return [[sample for i in part for sample in rows[i]] for part in np.array_split(order, count) if len(part)]
