"""Questions about the embedded corpus, made from what its pages say about each other, and their split by name."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

from searchrl_jax.data.schema import Document, Task

SLICES = ("known_item", "bridge", "pointed_bridge")

_PACKAGE_NAME = {"numpy": "NumPy", "scipy": "SciPy", "jax": "JAX", "optax": "Optax", "flax": "Flax"}

_KNOWN_ITEM = (
    'Which {package} {kind} does this: "{text}"?',
    'I need the {package} {kind} described as "{text}". What is it called?',
    'In {package}, find the {kind} for this: "{text}".',
)
_BRIDGE = (
    'Which pages are listed under See Also on the page of the {package} {kind} documented as "{text}"?',
    'The {package} reference describes a {kind} as "{text}". Which related pages does it point the reader to?',
    'Find the {package} {kind} that does this: "{text}". What else does its page refer to?',
)
_POINTED_BRIDGE = (
    'The page of the {package} {kind} documented as "{text}" links to something described as "{target}". What is it?',
    'Start from the {package} {kind} that does this: "{text}". Which entry of its See Also list fits "{target}"?',
    'One {package} {kind} is described as "{text}". Its page refers to another for this: "{target}". Which one?',
)

_GRADE_TARGET, _GRADE_PAGE = 2.0, 1.0

_MASK = "..."
_FEWEST_CONTENT_WORDS = 3
_WORDS_SINGLE, _WORDS_DOUBLE = 22, 13  # caps on a quoted text, alone or one of two: no question passes 45 words
_MOST_TARGETS = 6  # a ranking holds 10, and a bridge's own page comes on top of its targets

# fmt: off
_EMPTY_WORDS = frozenset({
    "a", "an", "and", "any", "are", "as", "at", "be", "by", "class", "compute", "computes", "for", "from", "function",
    "given", "if", "in", "into", "is", "it", "its", "method", "of", "on", "one", "or", "other", "return", "returns",
    "that", "the", "this", "to", "two", "use", "used", "using", "via", "when", "where", "which", "with", "without",
})
# fmt: on
# Descriptions that mean something only beside the page that they were written on.
_CONTEXTUAL = re.compile(
    r"(?:another|alias|also|alternative|corresponding|equivalent|like|more|other|related|same|see|similar|the same"
    r"|the above|the inverse|the equivalent|this|numpy-style|scipy-style|xla-style|lax-style)\b|.*\binstead\b",
    re.I,
)


# ------------------------------------------------------------------------------------------------ the split

_SALT, _TEST_SHARE, _VALIDATION_SHARE = "206", 0.22, 0.10

# Parts of a module's name that say where a thing is kept, not what it is about.
_CONTAINERS = frozenset({"numpy", "scipy", "lax", "ma", "char", "strings", "rec", "lib", "experimental", "core"})
_SAME_SUBJECT = {"fftpack": "fft", "tree_util": "tree"}
# Subjects of several hundred pages, the array functions ("") first of all, are dealt out by first letter.
_LARGE_SUBJECTS = frozenset({"", "special", "stats", "signal", "optax", "flax"})


def _family(title: str) -> str:
    package, *modules, name = title.lower().split(".")
    modules = [module for module in modules if module not in _CONTAINERS]
    subject = package if package in ("optax", "flax") else modules[0] if modules else ""
    subject = _SAME_SUBJECT.get(subject, subject)
    if package == "jax" and subject == "stats" and len(modules) > 1:
        name = modules[1]  # jax.scipy.stats.beta.pdf stands with scipy.stats.beta
    return f"{subject}/{name[0]}" if subject in _LARGE_SUBJECTS else subject


def split_of(title: str) -> str:
    """The side that a page stands on, from its name alone: "train", "validation" or "test".

    Whole families stand on one side: pages on one subject (every `linalg`, whatever the package), or, in the largest
    subjects, those that also begin with the same letter. So twins on one subject are not parted (numpy.sin and
    jax.numpy.sin), which would let training tell the answers of the test, and of 1,034 possible bridges 766 have all of
    their pages on one side; with pages dealt out one by one it was 229. The salt was picked, by the counts only, so
    that each side holds many subjects and each slice enough questions.
    """
    where = _fraction(_SALT, _family(title))
    return "test" if where < _TEST_SHARE else "validation" if where < _TEST_SHARE + _VALIDATION_SHARE else "train"


def _fraction(*parts: str) -> float:
    """A number in [0, 1) that depends on the strings only, alike on every machine (Python's own hash is salted)."""
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _common_split(documents: Sequence[Document]) -> str | None:
    splits = {split_of(document.title) for document in documents}
    return splits.pop() if len(splits) == 1 else None


# ------------------------------------------------------------------------------------------------ masking


def _own_names(documents: Sequence[Document]) -> frozenset[str]:
    """The last components of all of the pages' names: what a question about them must not say."""
    names = (name for document in documents for name in (document.title, *document.metadata["aliases"]))
    return frozenset(name.rpartition(".")[2] for name in names)


@lru_cache(maxsize=4096)
def _name_pattern(names: frozenset[str]) -> re.Pattern[str]:
    # `matrix_rank` gives the answer away as "matrix rank" and "matrix-rank" too.
    forms = sorted((re.escape(name).replace("_", r"[_\s-]") for name in names), key=lambda form: (-len(form), form))
    return re.compile(rf"(?<![A-Za-z0-9_])(?:[A-Za-z_]\w*\.)*(?:{'|'.join(forms)})(?![A-Za-z0-9_])(?:\(\))?", re.I)


def names_answer(question: str, documents: Sequence[Document]) -> bool:
    """Whether a question says a name of one of the documents, as a word or in code, in upper or lower case."""
    return _name_pattern(_own_names(documents)).search(question) is not None


def _masked(text: str, hidden: Sequence[Document], limit: int) -> str:
    """The text up to a TeX formula, the pages' names replaced by "...", cut after `limit` words; "" where too little is
    left."""
    prose = text.replace('"', "'").partition("\\")[0].rstrip(" :({")
    words = _name_pattern(_own_names(hidden)).sub(_MASK, prose).split()
    content = {word.lower() for word in re.findall(r"[A-Za-z]{3,}", " ".join(words[:limit]))} - _EMPTY_WORDS
    if len(content) < _FEWEST_CONTENT_WORDS:
        return ""
    return " ".join(words[:limit]) + (f" {_MASK}" if len(words) > limit else "")


def _ask(templates: Sequence[str], key: str, hidden: Sequence[Document], **texts: str) -> str | None:
    """A question from the template that the key picks, or from the next one whose own words name no answer."""
    start = int(_fraction("template", key) * len(templates))
    questions = (template.format(**texts) for template in (*templates[start:], *templates[:start]))
    return next((question for question in questions if not names_answer(question, hidden)), None)


def _normal(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


# ------------------------------------------------------------------------------------------------ the three slices


class _Corpus:
    """The pages by title, their described links, and which descriptions single out one page of a package."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.by_title = {document.title: document for document in documents}
        self._summarised: dict[tuple[str, str], set[str]] = defaultdict(set)
        for document in documents:
            self._summarised[document.metadata["package"], _normal(document.metadata["summary"])].add(document.title)
        self._described = defaultdict(set, {key: set(titles) for key, titles in self._summarised.items()})
        for _, target, description in self.described_links():
            self._described[target.metadata["package"], _normal(description)].add(target.title)

    def described_links(self) -> Iterator[tuple[Document, Document, str]]:
        """(page, linked page, what the page says of it)."""
        for page in self.by_title.values():
            for title, description in zip(page.metadata["see_also"], page.metadata["see_also_text"], strict=True):
                if description and title in self.by_title:
                    yield page, self.by_title[title], description

    def targets(self, page: Document) -> list[Document]:
        return [self.by_title[title] for title in page.metadata["see_also"] if title in self.by_title]

    def has_own_summary(self, page: Document) -> bool:
        return len(self._summarised[page.metadata["package"], _normal(page.metadata["summary"])]) == 1

    def singles_out(self, description: str, target: Document) -> bool:
        return len(self._described[target.metadata["package"], _normal(description)]) == 1


def _wording(page: Document, **texts: str) -> dict[str, str]:
    return {"package": _PACKAGE_NAME[page.metadata["package"]], "kind": page.metadata["kind"], **texts}


def _metadata(kind: str, split: str, page: Document, description: str) -> dict[str, str]:
    """What every task says of itself: the package as the question writes it, the description of `page` in it."""
    package = _PACKAGE_NAME[page.metadata["package"]]
    return {"slice": kind, "split": split, "package": package, "description": description}


def _known_items(corpus: _Corpus) -> Iterator[Task]:
    candidates: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for page, target, description in corpus.described_links():
        if _CONTEXTUAL.match(description) or not corpus.singles_out(description, target):
            continue
        # What a mask leaves of "Compute the ... of an array" is too little to know the answer by.
        text = "" if names_answer(description, [target]) else _masked(description, [target], _WORDS_SINGLE)
        if text:
            candidates[target.title].append((-len(text.split()), page.title, text))
    for title, descriptions in candidates.items():
        target = corpus.by_title[title]
        _, source, text = min(descriptions)  # the longest one: short ones are often too vague to search by
        question = _ask(_KNOWN_ITEM, title, [target], **_wording(target, text=text))
        if question is not None:
            metadata = _metadata("known_item", split_of(title), target, text) | {"source": source}
            yield Task(f"known_item/{title}", question, {title: _GRADE_TARGET}, metadata=metadata)


def _bridges(corpus: _Corpus) -> Iterator[Task]:
    for page in corpus.by_title.values():
        targets = corpus.targets(page)
        judged = [page, *targets]
        split = _common_split(judged)
        if split is None or not 2 <= len(targets) <= _MOST_TARGETS or not corpus.has_own_summary(page):
            continue
        text = _masked(page.metadata["summary"], judged, _WORDS_SINGLE)
        question = _ask(_BRIDGE, page.title, judged, **_wording(page, text=text)) if text else None
        if question is not None:
            relevance = {**{target.title: _GRADE_TARGET for target in targets}, page.title: _GRADE_PAGE}
            metadata = _metadata("bridge", split, page, text) | {"via": page.title}
            yield Task(f"bridge/{page.title}", question, relevance, metadata=metadata)


def _pointed_bridges(corpus: _Corpus) -> Iterator[Task]:
    candidates: dict[str, list[tuple[float, Task]]] = defaultdict(list)
    for page, target, description in corpus.described_links():
        split = _common_split([page, target])
        if split is None or _CONTEXTUAL.match(description) or not corpus.has_own_summary(page):
            continue
        text = _masked(page.metadata["summary"], [page, target], _WORDS_DOUBLE)
        target_text = _masked(description, [page, target], _WORDS_DOUBLE)
        if not text or not target_text or names_answer(description, [page, target]):
            continue
        key = f"{page.title}->{target.title}"
        question = _ask(_POINTED_BRIDGE, key, [page, target], **_wording(page, text=text, target=target_text))
        if question is not None:
            metadata = _metadata("pointed_bridge", split, page, text)
            metadata |= {"target_description": target_text, "via": page.title}
            relevance = {target.title: _GRADE_TARGET, page.title: _GRADE_PAGE}
            task = Task(f"pointed_bridge/{key}", question, relevance, metadata=metadata)
            candidates[page.title].append((_fraction("pointed", key), task))
    for tasks in candidates.values():
        yield min(tasks, key=lambda item: item[0])[1]  # one for each page, so that no long list fills the slice


def load_tasks(documents: Sequence[Document]) -> dict[str, list[Task]]:
    """Questions about the embedded corpus, by split.

    - `known_item`: which page fits this description, which another page's See Also section gives? It is graded 2.
    - `bridge`: what does the page with this summary point to? The 2 to 6 targets are graded 2, the page itself 1.
    - `pointed_bridge`: which of its targets fits this description? That target is graded 2, the page 1.

    Left out are links that point nowhere, descriptions with fewer than three content words or that fit several pages of
    the package, questions that would say the answer's name, and questions asked twice.

    Args:
        documents: what `load_documents` returned.

    Returns:
        The tasks of "train", "validation" and "test", each sorted by id. All documents judged in a task stand on its
        own side of the split, so no document judged in a test or validation task is judged in a training task.
        Metadata: `slice`, `split`, `description` (the text that the question quotes for its first hop), `source` (known
        items: the page that the description comes from), `via` (bridges: the page between) and `target_description`
        (pointed bridges).
    """
    corpus = _Corpus(documents)
    tasks = [*_known_items(corpus), *_bridges(corpus), *_pointed_bridges(corpus)]
    asked = Counter(_normal(task.query) for task in tasks)
    splits: dict[str, list[Task]] = {"train": [], "validation": [], "test": []}
    for task in sorted(tasks, key=lambda task: task.task_id):
        if asked[_normal(task.query)] == 1:
            splits[task.metadata["split"]].append(task)
    return splits
