"""One-shot retrievers and their fusion, and what is recorded of an episode."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from searchrl_jax.data.schema import Task
from searchrl_jax.evaluation.agents import FUSION_DEPTH, one_shot_records, record_of, slice_of
from searchrl_jax.evaluation.metrics import ndcg_at_k
from searchrl_jax.retrieval import Hit
from searchrl_jax.rollout.trajectory import Trajectory, Turn


class Fixed:
    """A retriever that always finds the same, and remembers how much it was asked for."""

    def __init__(self, ranking: Sequence[str]) -> None:
        self.ranking, self.asked = ranking, 0

    def search(self, query: str, k: int = 10, where: object = None) -> list[Hit]:
        self.asked = k
        return [Hit(doc_id, -float(rank)) for rank, doc_id in enumerate(self.ranking[:k])]

    def search_many(self, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        return [self.search(query, k) for query in queries]

    def save(self, path: object) -> None:
        raise NotImplementedError


TASK = Task("t", "question", {"a": 1.0, "b": 2.0}, metadata={"slice": "bridge"})


def test_fusion_is_reciprocal_rank_fusion_by_hand() -> None:
    lexical, dense = ["c", "a", "b", "d"], ["b", "d", "e", "a"]
    scores: dict[str, float] = {}
    for ranking in (lexical, dense):
        for rank, doc_id in enumerate(ranking, start=1):
            scores[doc_id] = scores.get(doc_id, 0.0) + 1 / (60 + rank)
    fused = sorted(scores, key=lambda doc_id: (-scores[doc_id], doc_id))
    assert fused[0] == "b"
    records = one_shot_records({"bm25": Fixed(lexical), "vector": Fixed(dense)}, [TASK])
    assert list(records) == ["bm25", "vector", "fusion"]
    for name, ranking in (("bm25", lexical), ("vector", dense), ("fusion", fused)):
        assert records[name][0].ndcg == pytest.approx(ndcg_at_k(ranking, TASK.relevance)), name
    assert len({records[name][0].ndcg for name in records}) == 3


def test_excluded_documents_take_up_no_rank() -> None:
    task = replace(TASK, excluded_ids=("x", "y"))
    tool = Fixed(["x", "b", "y", "a"])
    records = one_shot_records({"bm25": tool}, [task])
    assert records["bm25"][0].ndcg == records["fusion"][0].ndcg == 1.0
    assert tool.asked == FUSION_DEPTH + 2


def test_one_shot_records_count_their_calls_and_always_complete() -> None:
    records = one_shot_records({"bm25": Fixed(["a"]), "vector": Fixed([])}, [TASK, replace(TASK, task_id="u")])
    assert [record.task_id for record in records["fusion"]] == ["t", "u"]
    for name, calls in (("bm25", 1), ("vector", 1), ("fusion", 2)):
        record = records[name][0]
        assert (record.calls, record.turns, record.action_tokens, record.malformed_calls) == (calls, 1, 0, 0)
        assert record.status is None and record.slice == "bridge" and record.seconds >= 0
    assert records["vector"][0].ndcg == 0


def trajectory(status: str, reward: float | None) -> Trajectory:
    turns = [
        Turn("a", "o", 3, True, False, None, "bm25_search", 0.1),
        Turn("a", "o", 2, False, True, "no_call", None, 0.1),
        Turn("a", "o", 1, True, False, None, None, 0.1),
    ]
    is_action = np.array([False, True, True, True, False, True, True, False, True])
    zeros = np.zeros(9, np.float32)
    return Trajectory(
        uid=0,
        task_id="t",
        token_ids=zeros.astype(np.int32),
        is_action=is_action,
        behavior_logprob=zeros,
        policy_version=zeros.astype(np.int32),
        turn=zeros.astype(np.int32),
        status=status,
        reward=reward,
        turns=tuple(turns),
        seconds=1.5,
    )


def test_record_of_an_episode() -> None:
    record = record_of(trajectory("submitted", 0.75), TASK)
    assert (record.task_id, record.slice, record.status, record.ndcg) == ("t", "bridge", "submitted", 0.75)
    assert (record.turns, record.action_tokens, record.calls, record.malformed_calls) == (3, 6, 3, 1)
    assert record.seconds == 1.5


@pytest.mark.parametrize("status, reward", [("turn_limit", -1.0), ("tool_failure", None)])
def test_failed_episode_scores_zero_not_its_reward(status: str, reward: float | None) -> None:
    record = record_of(trajectory(status, reward), TASK)
    assert (record.ndcg, record.status) == (0.0, status)


def test_tasks_without_a_slice_are_of_one_kind() -> None:
    assert slice_of(TASK) == "bridge"
    assert slice_of(Task("t", "q", {"a": 1.0})) == "all"
