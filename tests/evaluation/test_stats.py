"""Intervals, paired tests and the decomposition against plain loops, closed forms and scipy."""

import numpy as np
import pytest
import scipy.stats

from searchrl_jax.evaluation.stats import (
    Interval,
    bootstrap_interval,
    decompose,
    paired_ratio_test,
    paired_test,
    resampled_sums,
    swapped_sums,
)


@pytest.fixture
def scores() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """nDCG and completion of base and tuned on 120 tasks of mixed difficulty."""
    rng = np.random.default_rng(7)
    skill = rng.uniform(0.2, 0.8, 120)
    base, tuned = skill + rng.uniform(-0.2, 0.1, 120), skill + rng.uniform(-0.1, 0.2, 120)
    base_done, tuned_done = rng.random(120) > 0.25, rng.random(120) > 0.05
    return np.where(base_done, base, 0.0), base_done, np.where(tuned_done, tuned, 0.0), tuned_done


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_interval_agrees_with_scipy(method: str) -> None:
    x = np.random.default_rng(0).exponential(size=80)
    ours = bootstrap_interval(x, method=method)  # type: ignore[arg-type]
    theirs = scipy.stats.bootstrap((x,), np.mean, n_resamples=10_000, method=method, rng=5).confidence_interval
    assert ours.value == pytest.approx(x.mean())
    # Two sets of 10,000 resamples: the bounds' Monte-Carlo error is about 0.003 here.
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.015)


def test_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        found = bootstrap_interval(rng.normal(0.5, 0.2, 60), resamples=400)
        hits += found.low <= 0.5 <= found.high
    assert 0.90 <= hits / 300 <= 0.99


def test_degenerate_samples_give_an_interval_of_no_width() -> None:
    for method in ("percentile", "bca"):
        assert bootstrap_interval([0.3], method=method) == Interval(0.3, 0.3, 0.3)
        assert bootstrap_interval([1.0] * 9, method=method) == Interval(1.0, 1.0, 1.0)
        two = bootstrap_interval([0.0, 1.0], method=method)
        assert two.low <= two.value == 0.5 <= two.high


def test_interval_depends_on_the_seed_alone_and_not_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).random(50)
    assert bootstrap_interval(x, seed=3) == bootstrap_interval(x, seed=3)
    assert bootstrap_interval(x, seed=3) != bootstrap_interval(x, seed=4)
    whole = resampled_sums(x[:, None], resamples=100)
    monkeypatch.setattr("searchrl_jax.evaluation.stats._BLOCK", 50 * 10)
    assert resampled_sums(x[:, None], resamples=100).shape == whole.shape
    assert bootstrap_interval(x).low == pytest.approx(0.5 - 0.09, abs=0.08)


def test_resampled_sums_draw_as_many_rows_as_there_are() -> None:
    assert (resampled_sums(np.ones((13, 1)), resamples=50) == 13).all()


def test_swapped_sums_keep_the_total_and_swap_whole_rows() -> None:
    a, b = np.array([[1.0, 10.0], [2.0, 20.0]]), np.zeros((2, 2))
    x, y = swapped_sums(a, b, resamples=200)
    assert (x + y == a.sum(0)).all()
    assert {tuple(row) for row in x} == {(0.0, 0.0), (1.0, 10.0), (2.0, 20.0), (3.0, 30.0)}


def test_p_value_matches_the_exact_enumeration() -> None:
    d = np.array([0.3, 0.1, -0.05, 0.2, 0.15, 0.02, -0.1, 0.25])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 8)).reshape(8, -1).T
    exact = np.mean(np.abs(signs @ d) >= abs(d.sum()) - 1e-12)
    assert paired_test(d, np.zeros(8), resamples=20_000).p == pytest.approx(exact, abs=0.01)


def test_p_value_is_never_zero_and_is_one_without_a_difference() -> None:
    ones, zeros = np.ones(40), np.zeros(40)
    found = paired_test(ones, zeros, resamples=999)
    assert (found.value, found.low, found.high, found.p) == (1.0, 1.0, 1.0, 1 / 1000)
    assert paired_test(zeros, ones, resamples=999).value == -1.0
    same = paired_test(ones, ones, resamples=999)
    assert (same.value, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)


def test_p_values_are_uniform_under_the_null() -> None:
    rng = np.random.default_rng(3)
    p = [paired_test(rng.normal(size=30), rng.normal(size=30), resamples=300).p for _ in range(200)]
    assert scipy.stats.kstest(p, "uniform").pvalue > 0.01


def test_ratio_test_equals_a_plain_loop(scores: tuple[np.ndarray, ...]) -> None:
    b, b_done, t, t_done = scores
    found = paired_ratio_test((t, t_done), (b, b_done), resamples=4000)
    assert found.value == pytest.approx(t[t_done].mean() - b[b_done].mean())
    rng = np.random.default_rng(11)
    drawn, swapped = [], []
    for _ in range(2000):
        i = rng.integers(0, len(b), len(b))
        drawn.append(t[i][t_done[i]].mean() - b[i][b_done[i]].mean())
        flip = rng.random(len(b)) < 0.5
        x, x_done = np.where(flip, b, t), np.where(flip, b_done, t_done)
        y, y_done = np.where(flip, t, b), np.where(flip, t_done, b_done)
        swapped.append(x[x_done].mean() - y[y_done].mean())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.01)
    assert found.p == pytest.approx(np.mean(np.abs(swapped) >= abs(found.value)), abs=0.02)


def test_ratio_test_reduces_to_the_plain_one_where_all_tasks_are_completed(scores: tuple[np.ndarray, ...]) -> None:
    b, _, t, _ = scores
    done = np.ones(len(b))
    assert paired_ratio_test((t, done), (b, done), resamples=500) == paired_test(t, b, resamples=500)


def test_ratio_test_has_no_value_where_nothing_was_completed_and_survives_rare_completion() -> None:
    nothing = paired_ratio_test((np.ones(5), np.ones(5)), (np.zeros(5), np.zeros(5)), resamples=50)
    assert np.isnan([nothing.value, nothing.low, nothing.high, nothing.p]).all()
    # One completed task of five is missed by a third of the resamples: those have no value and are left out.
    rare = paired_ratio_test((np.ones(5), np.ones(5)), ([0.5, 0, 0, 0, 0], [1, 0, 0, 0, 0]), resamples=500)
    assert (rare.value, rare.low, rare.high) == (0.5, 0.5, 0.5)


def test_decomposition_by_hand() -> None:
    # tasks:     both  both  newly completed  newly failed  neither
    base_ndcg = [0.50, 0.40, 0.0, 0.8, 0.0]
    base_done = [1, 1, 0, 1, 0]
    tuned_ndcg = [0.75, 0.45, 0.6, 0.0, 0.0]
    tuned_done = [1, 1, 1, 0, 0]
    split = decompose((base_ndcg, base_done), (tuned_ndcg, tuned_done), resamples=200)
    assert split.ranking == pytest.approx(0.3 / 5)
    assert split.newly_completed == pytest.approx(0.6 / 5)
    assert split.newly_failed == pytest.approx(-0.8 / 5)
    assert split.failure_avoidance == pytest.approx(-0.2 / 5)
    assert split.total == pytest.approx(0.1 / 5)
    assert split.tasks == {"both": 2, "newly_completed": 1, "newly_failed": 1, "neither": 1}


def test_decomposition_adds_up_and_its_total_is_the_paired_difference(scores: tuple[np.ndarray, ...]) -> None:
    b, b_done, t, t_done = scores
    split = decompose((b, b_done), (t, t_done), resamples=500)
    assert split.failure_avoidance + split.ranking == split.total
    assert split.newly_completed + split.newly_failed == split.failure_avoidance
    plain = paired_test(t, b, resamples=500)
    assert split.total == pytest.approx(plain.value)
    assert split.intervals["total"] == pytest.approx((plain.low, plain.high))


def test_decomposition_ignores_scores_of_failed_tasks() -> None:
    done, failed = np.array([1, 1]), np.array([1, 0])
    split = decompose(([0.5, np.nan], failed), ([0.5, 0.4], done), resamples=50)
    assert (split.ranking, split.failure_avoidance) == (0.0, 0.2)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="non-empty"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="1 of 2 values are not finite"):
        bootstrap_interval([1.0, np.nan])
    with pytest.raises(ValueError, match="got 95"):
        bootstrap_interval([1.0], confidence=95)
    with pytest.raises(ValueError, match="'basic'"):
        bootstrap_interval([1.0], method="basic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 2 values for 3 tasks"):
        paired_test([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="0 or more"):
        paired_ratio_test(([1.0], [-1.0]), ([1.0], [1.0]))
    with pytest.raises(ValueError, match="got 1 values for 2 tasks"):
        decompose(([1.0, 0.5], [1, 1]), ([1.0], [1]))
