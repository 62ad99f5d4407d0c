"""From text to index terms: words, the parts of identifiers, and character n-grams for scripts without spaces."""

import re
import threading
import unicodedata
from collections.abc import Sequence

import Stemmer

# Lucene's English list: short, so that few questions lose a word that matters. BM25's idf takes care of the rest.
# fmt: off
ENGLISH_STOPWORDS = (
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
)
# fmt: on

# Han, kana, Hangul, Thai, Lao, Burmese and Khmer: a clause is written without spaces (or, in Korean, a word with its
# particles), so as one token it would match nothing but itself.
SPACELESS = (
    "\u3005\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7a3"
    "\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\U00020000-\U0003347f"
)


def _combining_marks() -> str:
    # `\w` leaves out vowel signs, so without these "हिन्दी" would fall into pieces. The first plane is enough.
    return "".join(
        re.escape(chr(code)) for code in range(0x300, 0x10000) if unicodedata.category(chr(code)) in ("Mn", "Mc")
    )


_WORD = rf"[^\W{SPACELESS}]+(?:[{_combining_marks()}]+[^\W{SPACELESS}]*)*"
# A run of a spaceless script, or a word; dots and apostrophes inside a word belong to it (numpy.linalg.norm, user's).
_TOKEN = re.compile(rf"(?P<spaceless>[{SPACELESS}]+)|{_WORD}(?:[.'’]{_WORD})*")
# Batch|Norm and LSTM|Cell, but APIs whole. Digits don't split: float32 and conv2d are words of their own.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z](?!s$)[a-z])")


def _camel_words(name: str) -> list[str]:
    # Parts of one or two letters are no words: "NumPy" as "num" and "py" would match every "PyTorch" and "CuPy", and a
    # question that names NumPy would mostly ask for that (nDCG@10 fell by 0.04 on questions about the embedded corpus).
    words = _CAMEL.split(name)
    return words if min(map(len, words)) > 2 else [name]


class Analyzer:
    """Splits text into terms; the same for documents and queries, and safe to call from many threads.

    Text is normalised (NFKC). Then come, in lower case,

        words: without stop words, stemmed                  running of norms   -> run norm
        identifiers: their parts as words, and the whole    numpy.linalg.norm  -> numpi linalg norm numpy.linalg.norm
                                                            BatchNorm, NumPy   -> batch norm batchnorm, numpi
                                                            ttest_ind          -> ttest ind ttest_ind
        spaceless scripts: characters, and pairs of them    去黄山             -> 去 黄 山 去黄 黄山
    """

    def __init__(self, stemmer: str | None, stopwords: Sequence[str]) -> None:
        """
        Args:
            stemmer: the name of a Snowball algorithm ("english", "german", ...), or None.
            stopwords: words to drop, compared in lower case before stemming.
        """
        if stemmer is not None and stemmer not in Stemmer.algorithms():
            known = ", ".join(sorted(Stemmer.algorithms()))
            raise ValueError(f"stemmer: expected None or one of {known}, got {stemmer!r}; correct data.bm25_stemmer")
        self.stemmer = stemmer
        self.stopwords = tuple(sorted({word.lower() for word in stopwords}))
        self._dropped = frozenset(self.stopwords)
        # A PyStemmer object keeps its word in a buffer and must not be shared by threads: each thread gets its own.
        self._local = threading.local()

    def terms(self, text: str) -> list[str]:
        """The terms of `text`, in order, repeats kept."""
        terms: list[str] = []
        for match in _TOKEN.finditer(unicodedata.normalize("NFKC", text)):
            token = match.group()
            if match.lastgroup == "spaceless":
                terms.extend(token)
                terms.extend(token[start : start + 2] for start in range(len(token) - 1))
            elif token.isascii() and token.islower() and token.isalpha():
                self._add_word(terms, token)
            else:
                self._add_identifier(terms, token)
        return terms

    def _add_word(self, terms: list[str], word: str) -> None:
        if word not in self._dropped:
            terms.append(self._stem(word))

    def _add_identifier(self, terms: list[str], token: str) -> None:
        pieces = token.split(".")
        for piece in pieces:
            words = [word.lower() for name in piece.split("_") if name for word in _camel_words(name)]
            for word in words:
                self._add_word(terms, word)
            if len(words) > 1:
                terms.append(piece.lower().strip("_"))
        if len(pieces) > 1:
            terms.append(token.lower())

    def _stem(self, word: str) -> str:
        if self.stemmer is None:
            return word
        try:
            stem = self._local.stem
        except AttributeError:
            stem = self._local.stem = Stemmer.Stemmer(self.stemmer).stemWord
        return stem(word.replace("’", "'"))
