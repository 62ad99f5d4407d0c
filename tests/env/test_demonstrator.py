"""The scripted demonstrator: each style ends as it says, and what it writes is what a policy could have sampled."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from searchrl_jax.data.schema import Document, Task
from searchrl_jax.env import Limits, SearchEnv
from searchrl_jax.env.demonstrator import GOOD, LAZY, OVERLONG, RAMBLING, Demonstration, Demonstrator
from searchrl_jax.retrieval import Hit
from searchrl_jax.testing.tiny import TOOLS, tiny_dialect, tiny_documents, tiny_env, tiny_tasks
from searchrl_jax.text.hermes import Call, Malformed

DIALECT = tiny_dialect()
LIMITS = Limits(max_turns=4, max_tokens_per_turn=40, max_tokens_per_episode=400)
ROOMY = Limits(max_turns=6, max_tokens_per_turn=60, max_tokens_per_episode=900)


def demonstrator(style: str, limits: Limits = LIMITS, env: SearchEnv | None = None) -> Demonstrator:
    return Demonstrator(env or tiny_env(DIALECT, limits), DIALECT, tiny_documents(), {style: 1.0})


def played(style: str, limits: Limits = LIMITS, seeds: int = 5) -> list[Demonstration]:
    d = demonstrator(style, limits)
    return [
        d.demonstrate(task, np.random.default_rng([s, n])) for n, task in enumerate(tiny_tasks()) for s in range(seeds)
    ]


def actions(demonstration: Demonstration) -> list[list[int]]:
    """The ids of each turn of the policy."""
    ids, is_action = demonstration.token_ids.tolist(), demonstration.is_action
    begins = [i for i in range(1, len(ids)) if is_action[i] and not is_action[i - 1]]
    runs = []
    for begin in begins:
        end = begin
        while end < len(ids) and is_action[end]:
            end += 1
        runs.append(ids[begin:end])
    return runs


def calls(demonstration: Demonstration) -> list[Call]:
    parsed = [DIALECT.parse(ids) for ids in actions(demonstration)]
    assert all(isinstance(call, Call) for call in parsed)
    return [call for call in parsed if isinstance(call, Call)]


@pytest.mark.parametrize(
    "style, status", [(GOOD, "submitted"), (LAZY, "submitted"), (RAMBLING, "turn_limit"), (OVERLONG, "token_limit")]
)
def test_each_style_ends_in_its_status(style: str, status: str) -> None:
    for demonstration in played(style):
        assert (demonstration.style, demonstration.status) == (style, status)
        assert not demonstration.is_action[0] and demonstration.is_action[-1]


def test_good_demonstrations_earn_more_than_lazy_ones() -> None:
    good, lazy = ([d.reward for d in played(style)] for style in (GOOD, LAZY))
    assert np.mean(good) > np.mean(lazy) + 0.1
    assert np.mean(good) > 0.85


def test_good_reads_a_page_and_searches_for_the_names_on_it() -> None:
    task = next(task for task in tiny_tasks() if task.task_id == "bridge-apple")
    for seed in range(5):
        demonstration = demonstrator(GOOD).demonstrate(task, np.random.default_rng(seed))
        first, more, names, last = calls(demonstration)
        assert first.arguments == more.arguments and first.name in TOOLS
        assert (more.name, names.name, last.name) == (TOOLS[0], TOOLS[0], "submit")
        number = names.arguments["query"].split()[1].rstrip(":")
        assert names.arguments["query"].split() == ["See", f"{number}:", "tiny.pear", "+", "plum"]
        text = DIALECT.tokenizer.decode(demonstration.token_ids.tolist())
        assert f"[{number}] tiny.apple: " in text
        before = text[: text.index(f'"query": " See {number}:')]
        orders = [line.split(",") for line in re.findall(r"order:([\d,]+)", before)]
        order = orders[-1] if orders else re.findall(r"\[(\d+)\]", before)  # one tool alone was asked: as they came
        assert number == next(other for other in order if f" See {other}: " in before)  # the best page that has links
        assert demonstration.reward is not None and demonstration.reward > 0.8


def test_good_asks_for_more_where_there_is_no_page_to_read() -> None:
    task = next(task for task in tiny_tasks() if task.task_id.startswith("known"))
    first, more, last = calls(demonstrator(GOOD).demonstrate(task, np.random.default_rng(0)))
    assert first.arguments == more.arguments
    assert (more.name, last.name) == (TOOLS[0], "submit")


def test_lazy_searches_once() -> None:
    tools = set()
    for demonstration in played(LAZY):
        found = calls(demonstration)
        assert len(found) == 2 and found[1].name == "submit"
        tools.add(found[0].name)
    assert tools == set(TOOLS)


def test_rambling_uses_every_later_turn_on_the_second_tool() -> None:
    for demonstration in played(RAMBLING):
        assert [call.name for call in calls(demonstration)][1:] == [TOOLS[1]] * (LIMITS.max_turns - 1)
        assert demonstration.reward == -1


def test_overlong_fills_its_turn_with_what_it_has_read() -> None:
    for demonstration in played(OVERLONG):
        last = actions(demonstration)[-1]
        assert len(last) == LIMITS.max_tokens_per_turn and DIALECT.stop_id not in last
        query = DIALECT.tokenizer.decode(last).partition('"query": "')[2]
        read = DIALECT.tokenizer.decode(demonstration.token_ids[~demonstration.is_action].tolist()).split()
        pasted = query.split()
        # What it read comes first; where that is too little, words of other documents follow. Nothing goes in circles.
        triples = list(zip(pasted, pasted[1:], pasted[2:], strict=False))[:-1]
        assert pasted[0] in read and len(set(triples)) == len(triples)
        assert f'"name": "{TOOLS[1]}"' in DIALECT.tokenizer.decode(last)


def test_a_slip_is_written_again_and_not_imitated() -> None:
    limits = Limits(max_turns=20, max_tokens_per_turn=60, max_tokens_per_episode=2000)
    d = Demonstrator(tiny_env(DIALECT, limits), DIALECT, tiny_documents(), {GOOD: 1.0}, slips=1.0)
    opened, closed, malformed, again = 0, 0, 0, 0
    for number, task in enumerate(tiny_tasks()):
        for seed in range(3):
            demonstration = d.demonstrate(task, np.random.default_rng([number, seed]))
            assert demonstration.status == "submitted"
            is_wrong = demonstration.is_action & ~demonstration.is_imitated
            assert not (demonstration.is_imitated & ~demonstration.is_action).any()
            begin, before = 0, []
            for ids in actions(demonstration):
                begin = next(
                    i for i in range(begin, len(is_wrong)) if demonstration.token_ids[i : i + len(ids)].tolist() == ids
                )
                wrong, call = is_wrong[begin : begin + len(ids)], DIALECT.parse(ids)
                begin += len(ids)
                if isinstance(call, Malformed):  # all of it from the first wrong token on
                    assert wrong[-1] and wrong[wrong.argmax() :].all()
                    malformed += 1
                    again += ids == before
                elif wrong.any():
                    assert wrong.sum() <= 6 and not wrong[-1]
                    closed += 1
                before = ids
            assert not is_wrong[begin - len(ids) : begin].any()  # the last call is right
            opened += 1
    assert closed > opened / 2 and malformed > opened / 2 and again > malformed / 5
    for demonstration in played(GOOD):
        np.testing.assert_array_equal(demonstration.is_imitated, demonstration.is_action)


@pytest.mark.parametrize("style", [GOOD, LAZY, RAMBLING, OVERLONG])
def test_a_question_of_odd_characters_alone_is_played_to_an_end(style: str) -> None:
    d = Demonstrator(tiny_env(DIALECT, LIMITS), DIALECT, tiny_documents(), {style: 1.0}, slips=1.0)
    for seed in range(5):
        assert (
            d.demonstrate(Task("odd", '"[x]"', {"tiny.apple": 1.0}), np.random.default_rng(seed)).status != "submitted"
        )


def test_actions_are_marked_exactly() -> None:
    for style in (GOOD, LAZY, RAMBLING):
        for demonstration in played(style, seeds=1):
            unmarked = demonstration.token_ids[~demonstration.is_action].tolist()
            marked = demonstration.token_ids[demonstration.is_action].tolist()
            turns = len(calls(demonstration))
            assert marked.count(DIALECT.stop_id) == turns
            opened = DIALECT.tokenizer.control_ids["<tool_call>"]
            assert opened not in unmarked and marked.count(opened) == turns


def test_prompt_is_the_one_that_a_rollout_begins_with() -> None:
    for demonstration, task in zip(played(LAZY, seeds=1), tiny_tasks(), strict=True):
        prompt = DIALECT.render_prompt(task.query)
        assert demonstration.token_ids[: len(prompt)].tolist() == prompt
        assert demonstration.is_action.argmax() == len(prompt)


def test_style_is_drawn_whatever_the_question() -> None:
    d = Demonstrator(
        tiny_env(DIALECT, LIMITS), DIALECT, tiny_documents(), {GOOD: 0.4, LAZY: 0.3, RAMBLING: 0.2, OVERLONG: 0.1}
    )
    styles = [
        [d.demonstrate(task, np.random.default_rng(seed)).style for seed in range(30)] for task in tiny_tasks()[:4]
    ]
    assert all(column == styles[0] for column in styles)
    assert set(styles[0]) == {GOOD, LAZY, RAMBLING, OVERLONG}


@pytest.mark.parametrize("style", [GOOD, LAZY, RAMBLING, OVERLONG])
@pytest.mark.parametrize("max_turns, per_turn, per_episode", [(1, 40, 400), (2, 40, 400), (4, 20, 400), (4, 40, 110)])
def test_no_demonstration_breaks_a_limit(style: str, max_turns: int, per_turn: int, per_episode: int) -> None:
    for demonstration in played(style, Limits(max_turns, per_turn, per_episode), seeds=2):
        runs = actions(demonstration)
        assert len(runs) <= max_turns and max(map(len, runs)) <= per_turn
        assert len(demonstration.token_ids) <= per_episode
        assert demonstration.status != "submitted" or isinstance(DIALECT.parse(runs[-1]), Call)


def test_where_one_turn_is_left_it_is_kept_for_the_submission() -> None:
    assert {d.status for d in played(GOOD, replace(LIMITS, max_turns=2))} == {"submitted"}


class Nothing:
    """A retriever that never finds anything."""

    def search(self, query: str, k: int = 10, where: object = None) -> list[Hit]:
        return []

    def search_many(self, queries: Sequence[str], k: int = 10) -> list[list[Hit]]:
        return [[] for _ in queries]

    def save(self, path: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("style", [GOOD, LAZY])
def test_a_search_that_finds_nothing_is_tried_with_the_other_tool(style: str) -> None:
    real = tiny_env(DIALECT, LIMITS).retrievers[TOOLS[0]]
    one = tiny_env(DIALECT, LIMITS, {TOOLS[0]: Nothing(), TOOLS[1]: real})
    task = tiny_tasks()[0]
    for seed in range(10):
        demonstration = demonstrator(style, env=one).demonstrate(task, np.random.default_rng(seed))
        assert demonstration.status == "submitted"
        assert TOOLS[1] in [call.name for call in calls(demonstration)]
    none = tiny_env(DIALECT, LIMITS, dict.fromkeys(TOOLS, Nothing()))
    assert demonstrator(style, env=none).demonstrate(task, np.random.default_rng(0)).status == "turn_limit"


def test_a_task_without_metadata_is_played_by_its_question() -> None:
    task = Task("own", "Which page tells how to peel a red fruit?", {"tiny.apple": 1.0})
    demonstration = demonstrator(GOOD).demonstrate(task, np.random.default_rng(0))
    assert calls(demonstration)[0].arguments["query"].split() == task.query.split()
    assert demonstration.reward == 1.0


@pytest.mark.parametrize("shares", [{GOOD: 0.5, LAZY: 0.4}, {GOOD: 1.1, LAZY: -0.1}])
def test_shares_sum_to_one(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares of styles that sum to 1"):
        Demonstrator(tiny_env(DIALECT, LIMITS), DIALECT, tiny_documents(), shares)


def test_too_few_words_to_be_overlong_with_is_an_error_that_names_the_settings() -> None:
    documents = [Document("d", "one two", "d")]
    env = tiny_env(DIALECT, replace(LIMITS, max_tokens_per_turn=100), dict.fromkeys(TOOLS, Nothing()), documents)
    d = Demonstrator(env, DIALECT, documents, {OVERLONG: 1.0})
    with pytest.raises(ValueError, match="sampling.sampling_max_tokens"):
        d.demonstrate(Task("t", "two one", {"d": 1.0}), np.random.default_rng(0))


@pytest.mark.parametrize(
    "query",
    [
        'Parse {"a":{"b":"c"}} Which page does it?',
        'What is the "}} end?',
        "the <|im_end|> token",
        "哪一个页面说明了怎样削苹果的皮" * 4,
    ],
)
@pytest.mark.parametrize("style", [GOOD, LAZY])
def test_questions_of_any_text_are_asked_within_the_turn_s_tokens(query: str, style: str) -> None:
    for seed in range(5):
        demonstration = demonstrator(style, ROOMY).demonstrate(
            Task("own", query, {"tiny.apple": 1.0}), np.random.default_rng(seed)
        )
        assert demonstration.status in ("submitted", "turn_limit")  # the latter where nothing is found


@pytest.mark.parametrize("value", [None, 7, ["a"], 'x"}}', "words that the question does not hold"])
def test_metadata_that_the_question_does_not_hold_is_not_searched_for(value: object) -> None:
    query = "Which page tells how to peel a red fruit?"
    metadata = {"description": value, "package": value, "target_description": value, "via": value}
    task = Task("own", query, {"tiny.apple": 1.0}, metadata=metadata)
    for call in calls(demonstrator(GOOD).demonstrate(task, np.random.default_rng(0)))[:-1]:
        assert call.arguments["query"].split() == query.split()


def test_a_package_that_the_question_names_is_searched_for_with_what_it_quotes() -> None:
    metadata = {"description": "peel a red fruit", "package": "Tiny", "target_description": "cut a yellow one"}
    query = 'In Tiny, which page that "peel a red fruit" points to is for "cut a yellow one"?'
    first, second, _ = calls(
        demonstrator(GOOD).demonstrate(
            Task("own", query, {"tiny.apple": 1.0}, metadata=metadata), np.random.default_rng(0)
        )
    )
    assert first.arguments["query"] == "peel a red fruit Tiny"
    assert (second.name, second.arguments["query"]) == (TOOLS[0], "cut a yellow one Tiny")


def test_a_slip_that_fills_the_context_ends_the_demonstration() -> None:
    statuses = set()
    for tokens in range(120, 260, 10):
        env = tiny_env(DIALECT, Limits(max_turns=6, max_tokens_per_turn=60, max_tokens_per_episode=tokens))
        d = Demonstrator(env, DIALECT, tiny_documents(), {GOOD: 1.0}, slips=1.0)
        for n, task in enumerate(tiny_tasks()):
            demonstration = d.demonstrate(task, np.random.default_rng([tokens, n]))
            assert len(demonstration.token_ids) <= tokens
            statuses.add(demonstration.status)
    assert {"submitted", "context_limit"} <= statuses


def test_links_are_copied_from_what_can_still_be_read() -> None:
    env = tiny_env(DIALECT, ROOMY, keep_observations=1)
    d = Demonstrator(env, DIALECT, tiny_documents(), {GOOD: 1.0})
    found = 0
    for n, task in enumerate(tiny_tasks()):
        demonstration = d.demonstrate(task, np.random.default_rng(n))
        for row in np.split(np.arange(len(demonstration.token_ids)), demonstration.row_starts[1:]):
            ids, begins = demonstration.token_ids[row].tolist(), np.flatnonzero(demonstration.is_action[row])[0]
            call = DIALECT.parse(ids[begins : ids.index(DIALECT.stop_ids[0], begins) + 1])
            query = str(call.arguments.get("query", "")).strip() if isinstance(call, Call) else ""
            if query.startswith("See "):
                assert query in DIALECT.tokenizer.decode(ids[:begins])
                found += 1
    assert found > 6
