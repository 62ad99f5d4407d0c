"""Calls become actions only with the right arguments."""

import pytest

from searchrl_jax.env.actions import Refused, Search, Submit, read_action
from searchrl_jax.text.hermes import Call

TOOLS = ("bm25_search", "vector_search")


def test_good_calls():
    assert read_action(Call("bm25_search", {"query": " polyfit \n"}), TOOLS) == Search("bm25_search", "polyfit")
    assert read_action(Call("submit", {"ranking": [3, 1]}), TOOLS) == Submit((3, 1))
    assert read_action(Call("submit", {"ranking": [2, 1, 2]}), TOOLS) == Submit((2, 1))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (Call("web_search", {"query": "x"}), "unknown_tool", "bm25_search vector_search submit"),
        (Call("bm25_search", {"query": ""}), "empty_query", "empty query"),
        (Call("bm25_search", {"query": " \t\n\u3000"}), "empty_query", "empty query"),
        (Call("bm25_search", {}), "invalid_arguments", "query"),
        (Call("bm25_search", {"q": "x"}), "invalid_arguments", "query"),
        (Call("bm25_search", {"query": "x", "k": 3}), "invalid_arguments", "query"),
        (Call("bm25_search", {"query": ["x"]}), "invalid_arguments", "string"),
        (Call("bm25_search", {"query": None}), "invalid_arguments", "string"),
        (Call("submit", {"query": "x"}), "invalid_arguments", "ranking"),
        (Call("submit", {"ranking": []}), "invalid_arguments", "1 to 10"),
        (Call("submit", {"ranking": list(range(1, 12))}), "invalid_arguments", "1 to 10"),
        (Call("submit", {"ranking": "1,2"}), "invalid_arguments", "integers"),
        (Call("submit", {"ranking": [1.0]}), "invalid_arguments", "integers"),
        (Call("submit", {"ranking": [True]}), "invalid_arguments", "integers"),
        (Call("submit", {"ranking": ["1"]}), "invalid_arguments", "integers"),
        (Call("submit", {"ranking": [[1]]}), "invalid_arguments", "integers"),
    ],
)
def test_bad_calls_are_refused_with_what_was_wrong(call, error, says):
    action = read_action(call, TOOLS)
    assert isinstance(action, Refused)
    assert action.error == error
    assert says in action.message
    assert len(action.message) < 100
