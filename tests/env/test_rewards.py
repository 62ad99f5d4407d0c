"""Rewards of each status."""

import math

import pytest

from searchrl_jax.env.rewards import STATUSES, RewardSpec

RELEVANCE = {"b": 2.0, "c": 2.0, "a": 1.0}


def test_a_submission_is_paid_its_ndcg_with_linear_gain():
    ideal = 2 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)
    found = 1 / math.log2(2) + 2 / math.log2(4)
    reward, components = RewardSpec().score("submitted", ["a", "x", "c"], RELEVANCE)
    assert reward == pytest.approx(found / ideal)
    assert components == {"ndcg@10": reward, "failure": 0.0}


@pytest.mark.parametrize("status", ["turn_limit", "token_limit", "context_limit"])
def test_a_broken_limit_is_paid_minus_one_whatever_was_ranked(status):
    reward, components = RewardSpec().score(status, ["b", "c", "a"], RELEVANCE)
    assert reward == -1.0 == sum(components.values())
    assert components["ndcg@10"] == 0.0
    assert RewardSpec(failure_reward=-0.5).score(status, [], RELEVANCE)[0] == -0.5


def test_a_tool_failure_is_masked_not_paid_zero():
    """Fault 28."""
    assert RewardSpec().score("tool_failure", [], RELEVANCE) == (None, {})


def test_statuses_are_the_five_and_others_are_refused():
    assert STATUSES == ("submitted", "turn_limit", "token_limit", "context_limit", "tool_failure")
    with pytest.raises(ValueError, match="expected a status"):
        RewardSpec().score("done", [], RELEVANCE)


@pytest.mark.parametrize(
    "bad", [{"k": 0}, {"failure_reward": 0.1}, {"failure_reward": float("nan")}, {"malformed_reward": 0.1}]
)
def test_bad_specs_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        RewardSpec(**bad)
