"""A second, strict reading of finished episodes, from their text alone: a guard against rewards won through the parser.

It shares no code with `text/hermes.py`, the environment or `core/ndcg.py`, and looks at nothing but what was written
down: the turns' actions and observations. Where it disagrees with the environment, one of the two has a hole, and a
policy in training will find it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from searchrl_jax.data.schema import Document, Task
from searchrl_jax.rollout.trajectory import Trajectory

TOLERANCE = 1e-6

_CALL = re.compile(r"<tool_call>(\{.*\})</tool_call>(?:<\|im_end\|>)?", re.DOTALL)
_FORBIDDEN = re.compile(r'<\|(?:im_start|im_end|pad)\|>|</?tool_call>|</?tool_response>|"\}\}|\]\}\}')
_LINE = re.compile(r"\[([1-9][0-9]*)\] (.+)")
_AFTER_TITLE = re.compile(r":| See |$")

Titles = Mapping[str, Sequence[str]]


class Rescored(NamedTuple):
    """A second opinion on one episode.

    Attributes:
        is_consistent: the text, read strictly, leads to the recorded status and ranking, turn by turn.
        ndcg: nDCG@10 that the text earns; 0 where it submits nothing.
    """

    is_consistent: bool
    ndcg: float


def titles_of(documents: Iterable[Document]) -> Titles:
    """The ids of the documents that an observation shows under a title; several where titles repeat."""
    titles: dict[str, list[str]] = {}
    for document in documents:
        titles.setdefault(" ".join(document.title.split() or document.doc_id.split()), []).append(document.doc_id)
    return titles


def rescore(episode: Mapping[str, Any], relevance: Mapping[str, float], titles: Titles, *, k: int = 10) -> Rescored:
    """What the saved text of `episode` is worth.

    Only a turn that the environment took for a call *and* that is one here counts. A search gives the references
    `[n] title` of its observation; the first submission of references known by then ends the episode.

    Args:
        episode: as `Trajectory.to_json` gives it.
        relevance: the task's judgements.
        titles: from `titles_of`. Which of several documents of one title is meant, only the recorded ranking can say.
        k: depth of nDCG.
    """
    shown: list[frozenset[str]] = []
    submitted: list[frozenset[str]] | None = None
    is_consistent = True
    for turn in episode["turns"]:
        if submitted is not None:  # the episode should have been over
            return Rescored(False, 0.0)
        if not turn["is_call"]:
            continue
        call = _read_call(turn["action"])
        if call is None:
            is_consistent = False
        elif call["name"] == "submit":
            submitted = _read_ranking(call["arguments"], shown)
        elif turn["tool"] is not None:
            is_search = turn["tool"] == call["name"] and _is_query(call["arguments"])
            is_consistent &= is_search and _read_observation(turn["observation"], titles, shown)
    is_consistent &= (submitted is not None) == (episode["status"] == "submitted")
    ranking = []
    for position, candidates in enumerate(submitted or ()):
        recorded = episode["ranking"][position] if position < len(episode["ranking"]) else None
        is_consistent &= recorded in candidates
        ranking.append(recorded if recorded in candidates else min(candidates))
    return Rescored(is_consistent and len(ranking) == len(episode["ranking"]), _ndcg(ranking, relevance, k))


def rescored_metrics(trajectories: Sequence[Trajectory], tasks: Iterable[Task], titles: Titles) -> dict[str, float]:
    """How far the second reading is from the environment's, over the trajectories whose tools worked.

        rescored_ndcg_gap        largest |nDCG@10 of the text - nDCG@10 of the environment|
        rescored_inconsistent    share of trajectories whose text does not lead to what was recorded

    Both are 0 as long as all is well.
    """
    relevance = {task.task_id: task.relevance for task in tasks}
    valid = [trajectory for trajectory in trajectories if trajectory.is_valid]
    found = [rescore(trajectory.to_json(), relevance[trajectory.task_id], titles) for trajectory in valid]
    gaps = [abs(second.ndcg - trajectory.ndcg) for second, trajectory in zip(found, valid, strict=True)]
    return {
        "rescored_ndcg_gap": max(gaps, default=0.0),
        "rescored_inconsistent": sum(not second.is_consistent for second in found) / max(1, len(found)),
    }


def _read_call(action: str) -> dict[str, Any] | None:
    """The one call that `action` is, or None."""
    match = _CALL.fullmatch(action)
    if match is None:
        return None
    try:
        call = json.loads(match[1], object_pairs_hook=_distinct, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if set(call) != {"name", "arguments"} or not isinstance(call["name"], str):
        return None
    if not isinstance(call["arguments"], dict) or any(_FORBIDDEN.search(text) for text in _texts(call)):
        return None
    return call


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _texts(value: Any) -> list[str]:
    """All strings in `value`, keys included."""
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []


def _is_query(arguments: Mapping[str, Any]) -> bool:
    return set(arguments) == {"query"} and isinstance(arguments["query"], str) and bool(arguments["query"].strip())


def _read_ranking(arguments: Mapping[str, Any], shown: Sequence[frozenset[str]]) -> list[frozenset[str]] | None:
    """The documents that each submitted reference may stand for, or None where this is no valid submission."""
    numbers = arguments.get("ranking")
    if set(arguments) != {"ranking"} or not isinstance(numbers, list) or not 1 <= len(numbers) <= 10:
        return None
    if any(type(number) is not int or not 1 <= number <= len(shown) for number in numbers):
        return None
    return [shown[number - 1] for number in dict.fromkeys(numbers)]


def _read_observation(text: str, titles: Titles, shown: list[frozenset[str]]) -> bool:
    """Adds the observation's new references to `shown`; whether all of its references make sense."""
    for line in text.split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        number, candidates = int(match[1]), _named(match[2], titles)
        if number == len(shown) + 1 and candidates:
            shown.append(candidates)
        elif not 1 <= number <= len(shown) or not candidates & shown[number - 1]:
            return False
    return True


def _named(line: str, titles: Titles) -> frozenset[str]:
    """The documents whose title `line` may begin with."""
    heads = (line[: match.start()] for match in _AFTER_TITLE.finditer(line))
    return frozenset(doc_id for head in heads for doc_id in titles.get(head, ()))


def _ndcg(ranking: Sequence[str], relevance: Mapping[str, float], k: int) -> float:
    """nDCG@k by its definition, as a quotient of two dot products; a document counts once."""
    discount = 1 / np.log2(np.arange(2, k + 2))
    grades = np.zeros(k)
    for place, doc_id in enumerate(ranking[:k]):
        if doc_id not in ranking[:place]:
            grades[place] = max(relevance.get(doc_id, 0.0), 0.0)
    ideal = np.zeros(k)
    best = sorted((grade for grade in relevance.values() if grade > 0), reverse=True)[:k]
    ideal[: len(best)] = best
    return float(grades @ discount / (ideal @ discount)) if best else 0.0
