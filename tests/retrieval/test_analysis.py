"""Analyzer: the terms of words, identifiers and spaceless scripts."""

import pytest

from searchrl_jax.retrieval.analysis import ENGLISH_STOPWORDS, Analyzer

ENGLISH = Analyzer("english", ENGLISH_STOPWORDS)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Running of the norms", ["run", "norm"]),
        ("numpy.linalg.norm", ["numpi", "linalg", "norm", "numpy.linalg.norm"]),
        ("scipy.stats.ttest_ind", ["scipi", "stat", "ttest", "ind", "ttest_ind", "scipy.stats.ttest_ind"]),
        ("BatchNorm LSTMCell", ["batch", "norm", "batchnorm", "lstm", "cell", "lstmcell"]),
        ("NumPy NaNs BSpline", ["numpi", "nan", "bspline"]),
        ("APIs float32 conv2d", ["api", "float32", "conv2d"]),
        ("__init__", ["init"]),
        ("is_finite", ["finit", "is_finite"]),
        ("the user's and the user’s", ["user", "user"]),
        ("ＮＯＲＭ", ["norm"]),
        ("我去过黄山", ["我", "去", "过", "黄", "山", "我去", "去过", "过黄", "黄山"]),
        ("用numpy计算", ["用", "numpi", "计", "算", "计算"]),
        ("हिन्दी", ["हिन्दी"]),
        ("of the", []),
        (" .,_' ", []),
    ],
)
def test_terms(text: str, terms: list[str]) -> None:
    assert ENGLISH.terms(text) == terms


def test_without_stemmer_and_stop_words_words_stay_as_they_are() -> None:
    assert Analyzer(None, ()).terms("Running of the norms") == ["running", "of", "the", "norms"]


def test_another_language() -> None:
    assert Analyzer("german", ("Die",)).terms("Die Häuser") == Analyzer("german", ("die",)).terms("häusern")


def test_an_unknown_stemmer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="english.*got 'klingon'"):
        Analyzer("klingon", ())
