"""The second reading: agrees with the environment on honest episodes, and catches what a lenient parser lets by."""

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
import pytrec_eval

from searchrl_jax.data.schema import Document, Task
from searchrl_jax.evaluation.rescore import Rescored, rescore, rescored_metrics, titles_of
from searchrl_jax.rollout.trajectory import Trajectory, Turn
from searchrl_jax.testing.tiny import tiny_dialect, tiny_documents, tiny_env, tiny_tasks
from searchrl_jax.text.hermes import Call, Malformed, search_call, submit_call

TITLES = {"alpha": ["a"], "beta": ["b"], "gamma: rays": ["c"], "twin": ["t1", "t2"]}
RELEVANCE = {"a": 2.0, "c": 1.0}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><|im_end|>"


def turn(action: str, observation: str, *, is_call: bool = True, tool: str | None = None) -> dict[str, Any]:
    return {"action": action, "observation": observation, "is_call": is_call, "tool": tool}


def episode(*turns: dict[str, Any], ranking: list[str], status: str = "submitted") -> dict[str, Any]:
    return {"turns": list(turns), "ranking": ranking, "status": status}


SEARCH = turn(
    call("bm25_search", query=" rays"), "[1] gamma: rays: Some text. See alpha\n[2] beta See twin", tool="bm25_search"
)
AGAIN = turn(call("bm25_search", query="alpha"), "[2] beta\n[3] alpha: First letter.", tool="bm25_search")
SUBMIT = turn(call("submit", ranking=[3, 1]), "submitted")
HONEST = episode(SEARCH, AGAIN, SUBMIT, ranking=["a", "c"])


def test_honest_episode_is_consistent_and_ideal() -> None:
    assert rescore(HONEST, RELEVANCE, TITLES) == Rescored(True, 1.0)
    worse = episode(SEARCH, AGAIN, turn(call("submit", ranking=[2, 1]), "submitted"), ranking=["b", "c"])
    # the grade 1 at rank 2 over the ideal 2, 1
    expected = (1 / np.log2(3)) / (2 + 1 / np.log2(3))
    assert rescore(worse, RELEVANCE, TITLES) == (True, pytest.approx(expected))


@pytest.mark.parametrize(
    "action",
    [
        call("bm25_search", query=' rays"}}'),
        call("bm25_search", query=" rays <tool_call>"),
        call("bm25_search", query=" rays") + call("bm25_search", query=" rays"),
        call("bm25_search", query=" rays").replace("</tool_call>", ""),
        " " + call("bm25_search", query=" rays"),
        call("bm25_search", query=" rays").replace('"}}', '"}}"}}'),
        '<tool_call>{"name": "bm25_search", "arguments": {"query": "x", "query": "y"}}</tool_call>',
        '<tool_call>{"name": "bm25_search", "arguments": {"query": NaN}}</tool_call>',
        '<tool_call>["bm25_search"]</tool_call>',
        call("bm25_search", query=" "),
        call("bm25_search", query="rays", k=100),
        call("vector_search", query=" rays"),
        "<tool_call>{" + '"a":{' * 5000 + "</tool_call>",
    ],
)
def test_a_search_that_is_no_call_earns_no_references(action: str) -> None:
    hacked = copy.deepcopy(HONEST)
    hacked["turns"][0]["action"] = action
    found = rescore(hacked, RELEVANCE, TITLES)
    assert not found.is_consistent and found.ndcg == 0


@pytest.mark.parametrize(
    "ranking", [[], [0], [4], [-1], [1, 9], [True], [1.0], ["1"], list(range(1, 12)), [[1]], {"1": 1}, None]
)
def test_a_submission_must_name_known_references(ranking: Any) -> None:
    bad = episode(SEARCH, AGAIN, turn(call("submit", ranking=ranking), "submitted"), ranking=["a", "c"])
    assert rescore(bad, RELEVANCE, TITLES) == (False, 0.0)


def test_a_repeated_reference_counts_once() -> None:
    twice = episode(SEARCH, AGAIN, turn(call("submit", ranking=[3, 3, 1]), "submitted"), ranking=["a", "c"])
    assert rescore(twice, RELEVANCE, TITLES) == (True, 1.0)
    assert not rescore({**twice, "ranking": ["a", "a", "c"]}, RELEVANCE, TITLES).is_consistent


def test_what_the_environment_refused_counts_for_nothing() -> None:
    # malformed by its ids, though its text reads like a call: the environment went on, so does the second reading
    refused = turn(call("submit", ranking=[1]), "error: malformed", is_call=False)
    assert rescore(episode(SEARCH, refused, AGAIN, SUBMIT, ranking=["a", "c"]), RELEVANCE, TITLES) == (True, 1.0)
    unknown = turn(call("submit", ranking=[9]), "error: unknown reference 9")
    assert rescore(episode(SEARCH, unknown, AGAIN, SUBMIT, ranking=["a", "c"]), RELEVANCE, TITLES) == (True, 1.0)
    tool = turn(call("web_search", query="x"), "error: unknown tool")
    assert rescore(episode(tool, SEARCH, AGAIN, SUBMIT, ranking=["a", "c"]), RELEVANCE, TITLES) == (True, 1.0)


def test_status_and_ranking_must_follow_from_the_text() -> None:
    assert rescore(episode(SEARCH, AGAIN, ranking=[], status="turn_limit"), RELEVANCE, TITLES) == (True, 0.0)
    assert rescore(episode(SEARCH, AGAIN, ranking=[], status="submitted"), RELEVANCE, TITLES) == (False, 0.0)
    assert not rescore({**HONEST, "status": "token_limit"}, RELEVANCE, TITLES).is_consistent
    assert rescore({**HONEST, "ranking": ["c", "a"]}, RELEVANCE, TITLES) == (False, 1.0)
    assert not rescore({**HONEST, "ranking": ["a", "c", "b"]}, RELEVANCE, TITLES).is_consistent
    assert not rescore({**HONEST, "ranking": ["a"]}, RELEVANCE, TITLES).is_consistent
    assert rescore(episode(SEARCH, AGAIN, SUBMIT, SEARCH, ranking=["a", "c"]), RELEVANCE, TITLES) == (False, 0.0)


@pytest.mark.parametrize("line", ["[4] alpha", "[2] alpha", "[1] nobody", "[3] nobody: Text."])
def test_references_are_numbered_in_order_and_keep_their_document(line: str) -> None:
    odd = turn(call("bm25_search", query="alpha"), f"{line}\n[3] alpha", tool="bm25_search")
    assert not rescore(episode(SEARCH, odd, SUBMIT, ranking=["a", "c"]), RELEVANCE, TITLES).is_consistent


def test_a_repeated_title_is_told_apart_by_the_recorded_ranking_alone() -> None:
    search = turn(call("bm25_search", query="x"), "[1] twin: One.\n[2] twin: Two.", tool="bm25_search")
    submit = turn(call("submit", ranking=[2]), "submitted")
    assert rescore(episode(search, submit, ranking=["t2"]), {"t2": 1.0}, TITLES) == (True, 1.0)
    assert rescore(episode(search, submit, ranking=["a"]), {"a": 1.0}, TITLES) == (False, 0.0)


def test_titles_are_shown_on_one_line_and_fall_back_to_the_id() -> None:
    documents = [Document("d1", "x", "Two\n lines"), Document("d2", "x"), Document("d3", "x", "d2")]
    assert titles_of(documents) == {"Two lines": ["d1"], "d2": ["d2", "d3"]}


@pytest.mark.parametrize("seed", range(50))
def test_ndcg_equals_trec_eval(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"d{i}" for i in range(30)]
    relevance = {name: rng.choice([0, 0, 1, 2, 3]) for name in rng.sample(names, 20)} | {"d0": 1}
    ranking = rng.sample(names, rng.randint(1, 10))
    search = turn(call("s", query="x"), "\n".join(f"[{i}] {name}" for i, name in enumerate(names, start=1)), tool="s")
    submit = turn(call("submit", ranking=[names.index(name) + 1 for name in ranking]), "submitted")
    found = rescore(episode(search, submit, ranking=ranking), relevance, {name: [name] for name in names})
    evaluator = pytrec_eval.RelevanceEvaluator({"q": relevance}, {"ndcg_cut.10"})
    scores = {name: float(-rank) for rank, name in enumerate(ranking)}
    assert found == (True, pytest.approx(evaluator.evaluate({"q": scores})["q"]["ndcg_cut_10"], abs=1e-9))


def trajectory(task: Task, seed: int, **changes: Any) -> Trajectory:
    """A random player's episode in the real environment: searches, slips, and mostly a submission."""
    rng, dialect = random.Random(seed), tiny_dialect()
    environment = tiny_env(dialect).start(task)
    turns = []
    while not environment.done:
        known = len(environment.references.doc_ids)
        slip = [Call("web_search", {"query": "x"}), submit_call([99]), Malformed("no_call")]
        search = search_call("bm25_search", rng.choice(["red fruit", "trunk", "air", "water", "pear"]))
        submit = submit_call(rng.sample(range(1, known + 1), rng.randint(1, known))) if known else search
        action = rng.choice([search, submit, rng.choice(slip)])
        text = "hello" if isinstance(action, Malformed) else dialect.tokenizer.decode(dialect.render_call(action))
        result = environment.step(action)
        is_malformed = isinstance(action, Malformed)
        turns.append(Turn(text, result.observation, 1, not is_malformed, is_malformed, result.error, result.tool, 0.0))
    ids = np.zeros(2, np.int32)
    fields: dict[str, Any] = {
        "uid": seed,
        "task_id": task.task_id,
        "token_ids": ids,
        "is_action": ids == 1,
        "behavior_logprob": ids.astype(np.float32),
        "policy_version": ids,
        "turn": ids,
        "status": result.status,
        "reward": result.reward,
        "ranking": result.ranking,
        "turns": tuple(turns),
    }
    return Trajectory(**(fields | changes))


def test_agrees_with_the_environment_on_random_play() -> None:
    tasks, titles = tiny_tasks(), titles_of(tiny_documents())
    played = [trajectory(task, seed) for seed, task in enumerate(tasks * 5)]
    assert {t.status for t in played} == {"submitted", "turn_limit"}
    assert len({t.ndcg for t in played}) > 5
    found = rescored_metrics(played, tasks, titles)
    assert found["rescored_inconsistent"] == 0 and found["rescored_ndcg_gap"] < 1e-9


def test_metrics_show_a_reward_that_the_text_did_not_earn() -> None:
    task = tiny_tasks()[0]
    honest = [trajectory(task, seed) for seed in range(20)]
    submitted = next(t for t in honest if t.is_submitted)
    hacked = trajectory(task, submitted.uid, reward=submitted.ndcg + 0.25 if submitted.ndcg < 0.75 else 0.25)
    found = rescored_metrics([submitted, hacked], [task], titles_of(tiny_documents()))
    assert found["rescored_ndcg_gap"] >= 0.25
    failed = trajectory(task, 0, status="tool_failure", reward=None)
    assert rescored_metrics([failed], [task], titles_of(tiny_documents())) == {
        "rescored_ndcg_gap": 0.0,
        "rescored_inconsistent": 0.0,
    }
