"""One finished rollout, token by token."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from searchrl_jax.env.history import rows_between
from searchrl_jax.env.rewards import MALFORMED, SUBMITTED, TOOL_FAILURE


@dataclass(frozen=True)
class Turn:
    """One turn as a person reads it, and what it counts for. `detail` says how a tool or the environment failed."""

    action: str
    observation: str
    num_tokens: int
    is_call: bool
    is_malformed: bool
    error: str | None
    tool: str | None
    seconds: float
    detail: str | None = None


@dataclass(frozen=True)
class Trajectory:
    """All ids that a policy saw and sampled, in order; nothing is tokenised twice.

    Where the history was compressed, what came before was not a prefix of what followed: the trajectory then is several
    rows, one after the other in the arrays, each a whole context with the actions that were sampled in it. An action is
    marked in one row alone, the first that holds it; where a later row repeats it, it is context.

    Attributes:
        uid: unique in the run; seeds the rollout's sampling.
        token_ids: [L], prompt, actions and observations.
        is_action: [L], true where the policy sampled the token.
        behavior_logprob: [L], log-probability under the distribution sampled; 0 where `is_action` is false.
        policy_version: [L], learner step whose weights sampled the token; -1 where `is_action` is false.
        turn: [L], index of the turn that an action token belongs to; -1 elsewhere.
        reward: nDCG@10 or -1, and what malformed turns are charged; None where a tool failed and the rollout is masked.
        turn_rewards: what each turn was paid, for estimators that credit turns; empty where all is paid at the end.
        ranking: submitted document ids, best first.
        row_starts: index of the first token of each row, ascending from 0.
    """

    uid: int
    task_id: str
    token_ids: Int32[np.ndarray, " L"]
    is_action: Bool[np.ndarray, " L"]
    behavior_logprob: Float32[np.ndarray, " L"]
    policy_version: Int32[np.ndarray, " L"]
    turn: Int32[np.ndarray, " L"]
    status: str
    reward: float | None
    turn_rewards: tuple[float, ...] = ()
    components: dict[str, float] = field(default_factory=dict)
    ranking: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    seconds: float = 0.0
    row_starts: tuple[int, ...] = (0,)

    @property
    def rows(self) -> list[slice]:
        """The tokens of each row, up to its last action: what follows that is not learnt from."""
        return rows_between(self.row_starts, self.is_action)

    @property
    def is_valid(self) -> bool:
        """Whether the rollout may be trained on and stand in a baseline: no tool failed, and its reward is a number."""
        return self.status != TOOL_FAILURE and self.reward is not None and math.isfinite(self.reward)

    @property
    def task_reward(self) -> float:
        """nDCG@10 or -1: the reward without what malformed turns are charged, which says nothing of the task; 0 where
        the rollout is masked."""
        return 0.0 if self.reward is None else self.reward - self.components.get(MALFORMED, 0.0)

    @property
    def is_submitted(self) -> bool:
        """Whether the episode ended with a ranking."""
        return self.status == SUBMITTED

    @property
    def ndcg(self) -> float:
        """nDCG@10 of the submission, which is what its turn is paid; 0 for a failed episode."""
        if not self.is_submitted or self.reward is None:
            return 0.0
        return float(self.turn_rewards[-1] if self.turn_rewards else self.reward)

    @property
    def rewards_by_turn(self) -> tuple[float, ...]:
        """What each turn was paid: `turn_rewards`, or else nothing until the last, which gets the reward; nothing at
        all where the rollout is masked.

        Raises:
            ValueError: `turn_rewards` names another number of turns than were played.
        """
        turns = int(self.turn[self.is_action].max(initial=-1)) + 1
        if self.reward is None:
            return (0.0,) * turns
        if not self.turn_rewards:
            return (0.0,) * (turns - 1) + (float(self.reward),) * (turns > 0)
        if len(self.turn_rewards) != turns:
            raise ValueError(
                f"rollout {self.uid} of task {self.task_id!r}: expected a reward for each of its {turns} turns, got "
                f"{len(self.turn_rewards)}; pay 0 for a turn that earned nothing"
            )
        return self.turn_rewards

    @property
    def oldest_version(self) -> int:
        """The least policy version that sampled one of its tokens."""
        return int(self.policy_version[self.is_action].min())

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.is_action.sum())

    def to_json(self) -> dict[str, Any]:
        """The trajectory as a person reads it: text by turn, and the outcome; without the token arrays."""
        return {
            "uid": self.uid,
            "task_id": self.task_id,
            "status": self.status,
            "reward": self.reward,
            "turn_rewards": list(self.turn_rewards),
            "components": self.components,
            "ranking": list(self.ranking),
            "tokens": len(self.token_ids),
            "action_tokens": self.num_action_tokens,
            "seconds": self.seconds,
            "turns": [asdict(turn) for turn in self.turns],
        }
