"""Runs agents and one-shot retrievers over tasks, and records what each did."""

import time
from collections.abc import Callable, Mapping, Sequence

from searchrl_jax.core.ndcg import ndcg_at_k
from searchrl_jax.data.schema import Task
from searchrl_jax.evaluation.summary import EpisodeRecord
from searchrl_jax.models.decoder import Params
from searchrl_jax.retrieval import Retriever, reciprocal_rank_fusion
from searchrl_jax.rollout.collect import Player, Request
from searchrl_jax.rollout.engine import Sampling
from searchrl_jax.rollout.trajectory import Trajectory

FUSION_DEPTH = 50


def slice_of(task: Task) -> str:
    """The kind of task, for the table's blocks; "all" for tasks that name none."""
    return str(task.metadata.get("slice", "all"))


def play_tasks(
    player: Player,
    params: Params,
    tasks: Sequence[Task],
    sampling: Sampling,
    *,
    policy_version: int,
    group_size: int = 1,
    on_finished: Callable[[int], None] = lambda _: None,
) -> list[Trajectory]:
    """`group_size` episodes of each task, task by task, in order.

    Episode g of task i samples with uid i + g * len(tasks): agents meet the same random numbers, and the first
    episodes of the tasks are those of groups of one.
    """
    requests = [Request(i + g * len(tasks), task) for i, task in enumerate(tasks) for g in range(group_size)]
    return player.play(params, requests, sampling, policy_version=policy_version, on_finished=on_finished)


def record_of(trajectory: Trajectory, task: Task) -> EpisodeRecord:
    """What the table needs of an episode. A failed task scores 0, also where a tool failed."""
    return EpisodeRecord(
        task_id=task.task_id,
        slice=slice_of(task),
        status=trajectory.status,
        ndcg=trajectory.ndcg,
        turns=len(trajectory.turns),
        action_tokens=trajectory.num_action_tokens,
        seconds=trajectory.seconds,
        calls=len(trajectory.turns),
        malformed_calls=sum(turn.is_malformed for turn in trajectory.turns),
    )


def one_shot_records(tools: Mapping[str, Retriever], tasks: Sequence[Task]) -> dict[str, list[EpisodeRecord]]:
    """What each retriever does with the question itself as query, and their fusion by reciprocal rank.

    Args:
        tools: name in the table ("bm25", "vector") -> retriever.
    """
    records: dict[str, list[EpisodeRecord]] = {name: [] for name in (*tools, "fusion")}
    for task in tasks:
        excluded = set(task.excluded_ids)
        rankings = []
        began = time.perf_counter()
        for name, retriever in tools.items():
            at = time.perf_counter()
            hits = retriever.search(task.query, k=FUSION_DEPTH + len(excluded))
            ranking = [hit.doc_id for hit in hits if hit.doc_id not in excluded][:FUSION_DEPTH]
            rankings.append(ranking)
            records[name].append(_one_shot(task, ranking, time.perf_counter() - at, calls=1))
        fused = [hit.doc_id for hit in reciprocal_rank_fusion(rankings)]
        records["fusion"].append(_one_shot(task, fused, time.perf_counter() - began, calls=len(tools)))
    return records


def _one_shot(task: Task, ranking: Sequence[str], seconds: float, *, calls: int) -> EpisodeRecord:
    return EpisodeRecord(
        task_id=task.task_id,
        slice=slice_of(task),
        status=None,
        ndcg=float(ndcg_at_k(ranking, task.relevance)),
        turns=1,
        action_tokens=0,
        seconds=seconds,
        calls=calls,
        malformed_calls=0,
    )
