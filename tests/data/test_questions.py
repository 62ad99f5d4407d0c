import re

import pytest

from searchrl_jax.data.pydocs import load_documents
from searchrl_jax.data.questions import SLICES, load_tasks, names_answer, split_of
from searchrl_jax.data.schema import Document


def page(title, summary, links=(), aliases=(), **metadata):
    """A corpus page; `links` are (title, description) pairs."""
    return Document(
        title,
        f"{summary}.",
        title,
        {
            "package": title.split(".")[0],
            "kind": "function",
            "summary": summary,
            "aliases": list(aliases),
            "see_also": [name for name, _ in links],
            "see_also_text": [text for _, text in links],
            **metadata,
        },
    )


def ask(*pages):
    splits = load_tasks(pages)
    return {task.task_id: task for tasks in splits.values() for task in tasks}


# All of one subject, so that no split parts them.
SVD = page("numpy.linalg.svd", "Factor a matrix into singular vectors and values")
QR = page("numpy.linalg.qr", "Factor a matrix into orthogonal and triangular parts")


def linking(*links, title="numpy.linalg.pinv", summary="Invert a singular matrix by the Moore-Penrose rule"):
    return page(title, summary, links)


def test_one_page_gives_a_question_of_each_slice():
    described = "Decomposition by singular vectors, fully"
    tasks = ask(SVD, QR, linking((SVD.title, described), (QR.title, "")))
    assert set(tasks) == {
        "known_item/numpy.linalg.svd",
        "bridge/numpy.linalg.pinv",
        "pointed_bridge/numpy.linalg.pinv->numpy.linalg.svd",
    }
    known, bridge, pointed = (tasks[name] for name in sorted(tasks, key=lambda name: SLICES.index(name.split("/")[0])))
    assert known.relevance == {SVD.title: 2.0} and f'"{described}"' in known.query and "NumPy function" in known.query
    assert bridge.relevance == {SVD.title: 2.0, QR.title: 2.0, "numpy.linalg.pinv": 1.0}
    assert "Invert a singular matrix by the Moore-Penrose rule" in bridge.query
    assert pointed.relevance == {SVD.title: 2.0, "numpy.linalg.pinv": 1.0}
    assert pointed.metadata["via"] == bridge.metadata["via"] == "numpy.linalg.pinv"
    assert pointed.metadata["target_description"] in pointed.query and pointed.metadata["description"] in pointed.query


@pytest.mark.parametrize(
    "description",
    [
        "the other one",  # too few content words
        "Equivalent routine of another kind of library",  # means something only beside its page
        "Array factorisation by SVD with full vectors",  # the answer's name
        "Array factorisation by numpy.linalg.svd in full",
        "Factor a matrix into orthogonal and triangular parts",  # fits the summary of another page better
    ],
)
def test_known_items_that_are_vague_ambiguous_or_say_the_answer_are_dropped(description):
    assert "known_item/numpy.linalg.svd" not in ask(SVD, QR, linking((SVD.title, description)))


def test_a_description_of_two_pages_is_dropped():
    text = "Decomposition of arrays into factors"
    assert not [name for name in ask(SVD, QR, linking((SVD.title, text), (QR.title, text))) if "known_item" in name]


def test_a_link_to_a_missing_page_is_dropped():
    gone = ("numpy.gone", "Decomposition of arrays into factors")
    tasks = ask(SVD, QR, linking((SVD.title, ""), gone, (QR.title, "")))
    assert set(tasks) == {"bridge/numpy.linalg.pinv"}
    assert "numpy.gone" not in tasks["bridge/numpy.linalg.pinv"].relevance


def test_a_bridge_needs_two_to_six_targets_and_a_summary_of_its_own():
    others = [page(f"numpy.linalg.other{n}", f"Some routine number {n}") for n in range(7)]
    links = [(other.title, "") for other in others]
    assert not ask(*others, linking(*links[:1]))
    assert len(ask(*others, linking(*links[:2]))) == len(ask(*others, linking(*links[:6]))) == 1
    assert not ask(*others, linking(*links))
    assert not ask(*others, linking(*links[:2]), page("numpy.linalg.twin", linking().metadata["summary"]))


def test_a_bridge_masks_the_names_of_its_page_and_targets():
    summary = "Use numpy.linalg.svd or the QR method to pinv rectangular and singular matrices"
    (task,) = ask(SVD, QR, linking((SVD.title, ""), (QR.title, ""), summary=summary)).values()
    assert '"Use ... or the ... method to ... rectangular and singular matrices"' in task.query


def test_names_are_seen_as_words_in_any_spelling_and_in_aliases():
    target = page("numpy.linalg.matrix_rank", "Rank", aliases=["numpy.mrank"])
    for text in ("Find matrix_rank.", "the Matrix rank of", "a matrix-rank", "numpy.linalg.matrix_rank()", "`MRANK`"):
        assert names_answer(text, [target])
    for text in ("matrix_ranks", "rank of a matrix", "my_matrix_rank", "mranking"):
        assert not names_answer(text, [target])


def test_no_template_word_gives_the_answer():
    target = page("numpy.linalg.which", "Choose from many")
    tasks = ask(target, linking((target.title, "Choose elements from arrays by flags")))
    for task in tasks.values():
        assert "which" not in task.query.lower()


def test_families_stand_on_one_side_and_never_move():
    for name in ("sin", "linalg.svd", "fft.ifft2"):
        assert len({split_of(f"{package}.{name}") for package in ("numpy", "scipy", "jax.numpy", "jax.scipy")}) == 1
    assert split_of("jax.scipy.stats.norm.pdf") == split_of("scipy.stats.norm")
    # Written out: a change here moves test questions into training.
    assert [split_of(title) for title in EXPECTED] == list(EXPECTED.values())


EXPECTED = {
    "numpy.fft.fft": "test",
    "scipy.interpolate.CubicSpline": "test",
    "numpy.linalg.svd": "train",
    "numpy.sort": "train",
    "optax.adam": "test",
    "jax.random.normal": "test",
}


@pytest.fixture(scope="module")
def corpus():
    documents = load_documents()
    return {document.doc_id: document for document in documents}, load_tasks(documents)


def test_there_are_enough_tasks_of_each_slice(corpus):
    _, splits = corpus
    counts = {
        split: {name: sum(task.metadata["slice"] == name for task in tasks) for name in SLICES}
        for split, tasks in splits.items()
    }
    assert len(splits["train"]) >= 1200 and len(splits["validation"]) >= 150 and len(splits["test"]) >= 400
    assert counts["test"]["known_item"] >= 130
    assert counts["test"]["bridge"] >= 110 and counts["test"]["pointed_bridge"] >= 110
    assert min(counts["train"].values()) >= 350


def test_no_judged_document_of_the_test_is_judged_in_training(corpus):
    _, splits = corpus
    judged = {split: {doc_id for task in tasks for doc_id in task.relevance} for split, tasks in splits.items()}
    assert not judged["train"] & judged["validation"]
    assert not judged["train"] & judged["test"]
    assert not judged["validation"] & judged["test"]


def test_no_question_says_its_answer_or_is_asked_twice_or_too_long(corpus):
    by_id, splits = corpus
    tasks = [task for part in splits.values() for task in part]
    assert len({task.task_id for task in tasks}) == len(tasks)
    assert len({task.query.lower() for task in tasks}) == len(tasks)
    for task in tasks:
        assert len(task.query.split()) <= 45
        for doc_id in task.relevance:
            document = by_id[doc_id]
            for name in (document.title, *document.metadata["aliases"]):
                words = re.findall(r"[a-z0-9_]+", task.query.lower())
                assert name.rpartition(".")[2].lower() not in words, (name, task.query)


def test_bridge_judgements_are_the_page_and_all_that_it_lists(corpus):
    by_id, splits = corpus
    for task in (task for part in splits.values() for task in part):
        targets = {doc_id for doc_id, grade in task.relevance.items() if grade == 2}
        if task.metadata["slice"] == "bridge":
            assert targets == set(by_id[task.metadata["via"]].metadata["see_also"])
        if task.metadata["slice"] == "pointed_bridge":
            assert len(targets) == 1 and targets <= set(by_id[task.metadata["via"]].metadata["see_also"])
        if task.metadata["slice"] != "known_item":
            assert task.relevance[task.metadata["via"]] == 1


def test_the_tasks_are_the_same_whatever_the_order_of_the_documents(corpus):
    by_id, splits = corpus
    assert load_tasks(list(by_id.values())[::-1]) == splits
