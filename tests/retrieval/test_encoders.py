"""Encoders: the static embeddings against their own package, and the check of a callable's output."""

from pathlib import Path

import numpy as np
import pytest
import wordllama

from searchrl_jax.retrieval import encoders

TEXTS = ["Hello world", "a much longer text about the norms of matrices", "我去过黄山", "x"]


def test_wordllama_equals_its_own_package() -> None:
    theirs = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    ours = encoders.named_encoder("wordllama")(TEXTS)
    np.testing.assert_allclose(ours, theirs.embed(TEXTS, norm=True), atol=1e-6)
    assert ours.dtype == np.float32
    assert ours.shape == (4, 256)


def test_each_vector_depends_on_its_own_text_alone() -> None:
    encoder = encoders.named_encoder("wordllama")
    np.testing.assert_array_equal(encoder(TEXTS), np.concatenate([encoder([text]) for text in TEXTS]))


def test_a_text_without_tokens_is_the_zero_vector() -> None:
    np.testing.assert_array_equal(encoders.named_encoder("wordllama")([""]), np.zeros((1, 256), np.float32))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="wordllama; got 'bert'"):
        encoders.named_encoder("bert")


def test_batches_are_bounded_and_in_order() -> None:
    sizes = []

    def encoder(texts: list[str]) -> np.ndarray:
        sizes.append(len(texts))
        return np.array([[float(text)] for text in texts], np.float32)

    out = encoders.encode(encoder, [str(i) for i in range(encoders.BATCH + 5)], None)
    assert sizes == [encoders.BATCH, 5]
    np.testing.assert_array_equal(out[:, 0], np.arange(encoders.BATCH + 5))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (np.zeros((2, 4)), "float32, it gave float64"),
        (np.zeros((1, 4), np.float32), "for 2 texts it gave the shape"),
        (np.zeros(2, np.float32), r"\[n, d\]"),
        (np.zeros((2, 0), np.float32), r"\[n, d\]"),
        (np.array([[0, 1, 2, 3], [0, np.nan, 0, 0]], np.float32), "isn't finite for the text 'second'"),
        (np.zeros((2, 5), np.float32), "5 dimensions, 4 were expected"),
    ],
)
def test_bad_output_is_refused(output: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoders.encode(lambda texts: output, ["first", "second"], 4)
