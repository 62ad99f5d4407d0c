"""Intervals and tests for means over tasks: bootstrap, paired permutation, and what a gain is made of.

The unit of resampling is the task. Two agents are always compared on the same tasks with the same resamples, so that a
hard task is hard for both. Every metric here is a ratio of two sums over tasks, sum(numerator) / sum(denominator): for
a plain mean the denominator is 1 for each task, for a mean over completed tasks it is 1 where a task was completed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 10_000

# Draws per block of resamples: 4 million 8-byte counts are 32 MB, whatever the number of tasks.
_BLOCK = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A statistic and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A paired difference, the bounds of its confidence interval, and a two-sided permutation p-value."""

    value: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Decomposition:
    """What a difference in mean nDCG (failed = 0) is made of; see `decompose`.

    Attributes:
        total: failure_avoidance + ranking, exactly.
        failure_avoidance: newly_completed + newly_failed, exactly.
        ranking: the part of the tasks that both agents completed.
        newly_completed: the part of the tasks that only the tuned agent completed (0 or more).
        newly_failed: the part of the tasks that only the base agent completed (0 or less).
        tasks: how many tasks each part rests on: "both", "newly_completed", "newly_failed", "neither".
        intervals: (low, high) of each of the five parts.
    """

    total: float
    failure_avoidance: float
    ranking: float
    newly_completed: float
    newly_failed: float
    tasks: Mapping[str, int]
    intervals: Mapping[str, tuple[float, float]]


def bootstrap_interval(
    values: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
    method: Literal["percentile", "bca"] = "percentile",
) -> Interval:
    """The mean of `values` with a bootstrap confidence interval.

    Values that are all equal, a single value among them, give an interval of no width. That says that the sample shows
    no spread, not that the mean is known exactly: 0 failures in 400 tasks still allow a rate of up to 3 / 400.

    Args:
        values: one number per task.
        confidence: share of intervals that should hold the true mean, in (0, 1).
        resamples: number of bootstrap samples.
        seed: the same seed and number of values give the same resamples.
        method: "percentile", or "bca" (bias-corrected and accelerated, for skewed values) by `scipy.stats.bootstrap`.

    Raises:
        ValueError: no values, values that are not finite or not one-dimensional, or settings out of range.

    Source:
        Efron & Tibshirani 1993, chapters 13 and 14.
    """
    x = _vector(values, "values")
    _check_settings(confidence, resamples)
    if method not in ("percentile", "bca"):
        raise ValueError(f'method must be "percentile" or "bca", got {method!r}')
    mean = float(x.mean())
    if np.all(x == x[0]):
        return Interval(mean, mean, mean)
    if method == "percentile":
        means = resampled_sums(x[:, None], resamples=resamples, seed=seed) / len(x)
        low, high = percentile_bounds(means, confidence)[0]
        return Interval(mean, low, high)
    found = scipy.stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="BCa",
        batch=max(1, _BLOCK // len(x)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high))


def paired_test(
    a: ArrayLike,
    b: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """mean(a) - mean(b) over the same tasks, with a paired bootstrap interval and a sign-flip permutation p-value.

    Under the null hypothesis a task's two values could as well have come the other way round, so the sign of each
    task's difference is flipped with probability 1/2, m = `resamples` times:

        p = (1 + number of flipped |mean difference| >= |observed|) / (m + 1)

    which is never 0, and 1 where all differences are 0.

    Args:
        a, b: one number per task, in the same order of tasks.
        confidence, resamples, seed: as in `bootstrap_interval`; `resamples` is also the number of permutations.

    Raises:
        ValueError: as `bootstrap_interval`, or the two differ in length.

    Source:
        Smucker, Allan & Carterette 2007 (randomisation tests in retrieval); Phipson & Smyth 2010 for the (b+1)/(m+1).
    """
    x, y = _vector(a, "a"), _vector(b, "b")
    ones_x, ones_y = np.ones_like(x), np.ones_like(y)
    return paired_ratio_test((x, ones_x), (y, ones_y), confidence=confidence, resamples=resamples, seed=seed)


def paired_ratio_test(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """sum(num_a) / sum(den_a) - sum(num_b) / sum(den_b) with a paired bootstrap interval and a permutation p-value.

    For "nDCG given completion of tuned minus that of base" an agent's pair is (where(completed, ndcg, 0), completed):
    the two means run over different tasks, so differences per task don't exist, but tasks can be resampled and the two
    agents' labels swapped within tasks all the same. A resample in which a denominator is 0 has no value: it is left
    out of the interval, and counts against the observed difference in p.

    The p-value is that of "within each task the two agents' outcomes are exchangeable", which is false as soon as the
    failure rates differ. Where they do, the interval is the better witness.

    Args:
        a, b: (numerator, denominator), one number per task each; denominators of 0 or more.
        confidence, resamples, seed: as in `paired_test`, to which this reduces where all denominators are 1.

    Returns:
        The difference; all four fields are NaN where a denominator's sum is 0.

    Raises:
        ValueError: arrays of different lengths, negative denominators, or as `bootstrap_interval`.
    """
    _check_settings(confidence, resamples)
    x = np.stack([_vector(a[0], "numerator of a"), _same_length(a[1], a[0], "denominator of a")], axis=1)
    y = np.stack([_same_length(b[0], a[0], "numerator of b"), _same_length(b[1], a[0], "denominator of b")], axis=1)
    if min(x[:, 1].min(), y[:, 1].min()) < 0:
        raise ValueError("denominators must be 0 or more; got a negative one")
    sums = resampled_sums(np.concatenate([x, y], axis=1), resamples=resamples, seed=seed)
    samples = ratio(sums[:, 0:1], sums[:, 1:2]) - ratio(sums[:, 2:3], sums[:, 3:4])
    value = ratio(x[:, :1].sum(0), x[:, 1:].sum(0)) - ratio(y[:, :1].sum(0), y[:, 1:].sum(0))
    swapped_x, swapped_y = swapped_sums(x, y, resamples=resamples, seed=seed)
    permuted = ratio(swapped_x[:, :1], swapped_x[:, 1:]) - ratio(swapped_y[:, :1], swapped_y[:, 1:])
    if np.isnan(value[0]):
        return Difference(np.nan, np.nan, np.nan, np.nan)
    low, high = percentile_bounds(samples, confidence)[0]
    return Difference(float(value[0]), low, high, float(permutation_p(value, permuted)[0]))


def decompose(
    base: tuple[ArrayLike, ArrayLike],
    tuned: tuple[ArrayLike, ArrayLike],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Decomposition:
    """Splits the gain in mean nDCG (failed = 0) into failure avoidance and ranking, by who completed the task.

    With n tasks, b_i and t_i the nDCG of base and tuned:

        ranking           =   sum over tasks that both completed        of (t_i - b_i) / n
        newly_completed   =   sum over tasks that only tuned completed  of  t_i / n
        newly_failed      = - sum over tasks that only base completed   of  b_i / n
        failure_avoidance = newly_completed + newly_failed
        total             = failure_avoidance + ranking                 =  mean(t) - mean(b)

    Tasks that neither completed add nothing. Each task belongs to one part, so each part reads plainly: what was won on
    tasks that were answered before and after, what was won by answering at all, and what was lost by ceasing to. A
    product formula (completion rate times mean given completion) would instead credit "ranking" with the change in
    *which* tasks are completed.

    Args:
        base, tuned: (ndcg, completed), one entry per task each, in the same order of tasks. An nDCG where `completed`
            is false isn't looked at.
        confidence, resamples, seed: as in `bootstrap_interval`; tasks are resampled.

    Returns:
        The parts and their intervals. Floating-point sums are exact as stated; mean(t) - mean(b) holds to rounding.

    Raises:
        ValueError: as `bootstrap_interval`, or the arrays differ in length.
    """
    _check_settings(confidence, resamples)
    (b, base_done), (t, tuned_done) = _completed_scores(base, "base"), _completed_scores(tuned, "tuned")
    _same_length(t, b, "tuned")
    parts = decomposition_columns((b, base_done), (t, tuned_done))
    bounds = percentile_bounds(resampled_sums(parts, resamples=resamples, seed=seed) / len(b), confidence)
    return decomposition_of(parts, base_done, tuned_done, bounds)


PARTS = ("total", "failure_avoidance", "ranking", "newly_completed", "newly_failed")


def decomposition_columns(base: tuple[Floats, Floats], tuned: tuple[Floats, Floats]) -> Floats:
    """What each task adds to n times each of `PARTS`: an array [tasks, 5]. Arguments as `decompose`, failed = 0."""
    (b, base_done), (t, tuned_done) = base, tuned
    ranking = np.where((base_done > 0) & (tuned_done > 0), t - b, 0.0)
    newly_completed = np.where((base_done == 0) & (tuned_done > 0), t, 0.0)
    newly_failed = np.where((base_done > 0) & (tuned_done == 0), -b, 0.0)
    return np.stack([t - b, newly_completed + newly_failed, ranking, newly_completed, newly_failed], axis=1)


def decomposition_of(
    parts: Floats, base_done: Floats, tuned_done: Floats, bounds: Sequence[tuple[float, float]]
) -> Decomposition:
    """The `Decomposition` of these columns (`decomposition_columns`) and their intervals, in the order of `PARTS`."""
    ranking, newly_completed, newly_failed = (float(part) for part in parts[:, 2:].mean(axis=0))
    avoidance = newly_completed + newly_failed
    before, after = base_done > 0, tuned_done > 0
    return Decomposition(
        total=avoidance + ranking,
        failure_avoidance=avoidance,
        ranking=ranking,
        newly_completed=newly_completed,
        newly_failed=newly_failed,
        tasks={
            "both": int((before & after).sum()),
            "newly_completed": int((~before & after).sum()),
            "newly_failed": int((before & ~after).sum()),
            "neither": int((~before & ~after).sum()),
        },
        intervals=dict(zip(PARTS, bounds, strict=True)),
    )


def resampled_sums(columns: Floats, *, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Column sums over bootstrap samples of the rows: [tasks, m] -> [resamples, m].

    All columns see the same resamples, so statistics of several agents computed from one call are paired.
    """
    tasks = len(columns)

    def draw(rng: np.random.Generator, rows: int) -> Floats:
        drawn = rng.integers(0, tasks, size=(rows, tasks)) + tasks * np.arange(rows)[:, None]
        return np.bincount(drawn.ravel(), minlength=rows * tasks).reshape(rows, tasks).astype(np.float64)

    return np.concatenate([weights @ columns for weights in _blocks(draw, tasks, resamples, (seed, 0))])


def swapped_sums(a: Floats, b: Floats, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[Floats, Floats]:
    """Column sums of a and b, [resamples, m] each, after the rows of a and b changed places with probability 1/2."""

    def draw(rng: np.random.Generator, rows: int) -> Floats:
        return rng.integers(0, 2, size=(rows, len(a)), dtype=bool).astype(np.float64)

    moved = np.concatenate([is_swapped @ (b - a) for is_swapped in _blocks(draw, len(a), resamples, (seed, 1))])
    return a.sum(axis=0) + moved, b.sum(axis=0) - moved


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """numerator / denominator; NaN where the denominator is 0."""
    # Sums of 0/1 denominators come out of a subtraction in `swapped_sums`: below 1e-9 they are rounding residue.
    is_defined = denominator > 1e-9
    return np.where(is_defined, numerator / np.where(is_defined, denominator, 1.0), np.nan)


def percentile_bounds(samples: Floats, confidence: float = CONFIDENCE) -> list[tuple[float, float]]:
    """(low, high) of each column's samples, leaving out NaN; (NaN, NaN) for a column with nothing else."""
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    bounds = []
    for column in samples.T:
        kept = column[~np.isnan(column)]
        low, high = np.quantile(kept, tails) if len(kept) else (np.nan, np.nan)
        bounds.append((float(low), float(high)))
    return bounds


def permutation_p(observed: Floats, permuted: Floats) -> Floats:
    """Two-sided p-values (1 + #{|permuted| >= |observed|}) / (m + 1) of each column of `permuted`, [m, columns]."""
    # Permutations that reproduce the observed value differ from it by rounding and must count as equal to it.
    tolerance = 1e-9 * np.maximum(1.0, np.abs(observed))
    is_as_extreme = ~(np.abs(permuted) < np.abs(observed) - tolerance)
    p = (1.0 + is_as_extreme.sum(axis=0)) / (1.0 + len(permuted))
    return np.where(np.isnan(observed), np.nan, p)


def _blocks(
    draw: Callable[[np.random.Generator, int], Floats], tasks: int, resamples: int, seed: tuple[int, int]
) -> Iterator[Floats]:
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // tasks)
    for start in range(0, resamples, rows):
        yield draw(rng, min(rows, resamples - start))


def _vector(values: ArrayLike, name: str) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError(f"{name}: expected a non-empty array of one number per task, got shape {x.shape}")
    if not np.isfinite(x).all():
        odd = int((~np.isfinite(x)).sum())
        raise ValueError(f"{name}: {odd} of {len(x)} values are not finite; a failed task counts 0")
    return x


def _same_length(values: ArrayLike, other: ArrayLike, name: str) -> Floats:
    x, tasks = _vector(values, name), np.size(np.asarray(other))
    if len(x) != tasks:
        raise ValueError(f"{name}: got {len(x)} values for {tasks} tasks; both need the same tasks")
    return x


def _completed_scores(outcomes: tuple[ArrayLike, ArrayLike], name: str) -> tuple[Floats, Floats]:
    ndcg, completed = outcomes
    done = _vector(completed, f"{name} completed")
    raw = np.asarray(ndcg, dtype=np.float64)
    if raw.shape != done.shape:
        raise ValueError(f"{name}: ndcg has shape {raw.shape} and completed {done.shape}; both need one entry per task")
    return _vector(np.where(done > 0, raw, 0.0), f"{name} ndcg"), (done > 0).astype(np.float64)


def _check_settings(confidence: float, resamples: int) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}; 95 % is 0.95")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
