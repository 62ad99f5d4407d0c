"""The reward of an episode and of its turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from searchrl_jax.core.ndcg import ndcg_at_k

SUBMITTED = "submitted"
TURN_LIMIT = "turn_limit"
TOKEN_LIMIT = "token_limit"
CONTEXT_LIMIT = "context_limit"
TOOL_FAILURE = "tool_failure"
LIMIT_STATUSES = (TURN_LIMIT, TOKEN_LIMIT, CONTEXT_LIMIT)
STATUSES = (SUBMITTED, *LIMIT_STATUSES, TOOL_FAILURE)

MALFORMED = "malformed"  # the component of a reward that malformed turns were charged


@dataclass(frozen=True)
class RewardSpec:
    """How an episode is paid at its end, and a malformed turn at once.

        submitted                              nDCG@k of the ranking (trec_eval: linear gain, log2 discount)
        turn_limit, token_limit, context_limit failure_reward
        tool_failure                           None: masked, never trained as a zero
        each turn that is no call              malformed_reward, whatever the end

    Attributes:
        k: depth of nDCG.
        failure_reward: at most 0, so that no limit pays better than the worst submission.
        malformed_reward: at most 0.
    """

    k: int = 10
    failure_reward: float = -1.0
    malformed_reward: float = 0.0

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"expected k >= 1, got {self.k}; give the depth of nDCG")
        for name in ("failure_reward", "malformed_reward"):
            value = getattr(self, name)
            if not math.isfinite(value) or value > 0:
                raise ValueError(f"expected a finite {name} <= 0, got {value}; a fault must not pay")

    def score(
        self, status: str, ranked_ids: Sequence[str], relevance: Mapping[str, float]
    ) -> tuple[float | None, dict[str, float]]:
        """The pay at the end and its components, which add up to it; `(None, {})` where the episode is masked.

        Args:
            status: one of `STATUSES`.
            ranked_ids: the submitted documents, best first; read only where the status is "submitted".
            relevance: judgements by document id.

        Raises:
            ValueError: the status is none of ours.
        """
        if status not in STATUSES:
            raise ValueError(f"expected a status of {STATUSES}, got {status!r}; an episode ends in exactly one of them")
        if status == TOOL_FAILURE:
            return None, {}
        ndcg = float(ndcg_at_k(ranked_ids, relevance, k=self.k)) if status == SUBMITTED else 0.0
        failure = self.failure_reward if status in LIMIT_STATUSES else 0.0
        return ndcg + failure, {f"ndcg@{self.k}": ndcg, "failure": failure}
