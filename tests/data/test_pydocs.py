import hashlib
import subprocess
import sys
import time

import pytest

from searchrl_jax.data.pydocs import load_documents, main


@pytest.fixture(scope="module")
def documents():
    started = time.process_time()
    found = load_documents()
    assert time.process_time() - started < 15
    return found


@pytest.fixture(scope="module")
def by_title(documents):
    return {document.title: document for document in documents}


def test_pages_are_distinct_and_link_to_pages(documents, by_title):
    assert len(by_title) == len(documents) >= 3000
    assert len({document.text for document in documents}) == len(documents)
    assert {document.metadata["package"] for document in documents} == {"numpy", "scipy", "jax", "optax", "flax"}
    for document in documents:
        assert document.doc_id == document.title
        assert set(document.metadata["see_also"]) <= set(by_title) - {document.title}
        assert len(document.metadata["see_also"]) == len(document.metadata["see_also_text"])


def test_text_begins_with_the_summary(documents):
    for document in documents:
        opening = " ".join(document.text.split())
        assert document.metadata["summary"] and opening.startswith(document.metadata["summary"])
        assert ":func:`" not in document.text


def test_aliases_make_one_page_under_the_shortest_name(documents, by_title):
    assert "jax.nn.relu" in by_title and "flax.linen.relu" in by_title["jax.nn.relu"].metadata["aliases"]
    names = [name for document in documents for name in (document.title, *document.metadata["aliases"])]
    assert len(names) == len(set(names))
    for document in documents:
        key = (len(document.title), document.title)
        assert all(key < (len(name), name) for name in document.metadata["aliases"])


def test_a_page_reads_as_its_reference_does(by_title):
    page = by_title["numpy.flipud"]
    assert page.metadata["summary"] == "Reverse the order of elements along axis 0 (up/down)"
    assert page.metadata["signature"] == "flipud(m)"
    assert (page.metadata["module"], page.metadata["kind"]) == ("numpy", "function")
    links = dict(zip(page.metadata["see_also"], page.metadata["see_also_text"], strict=True))
    assert links["numpy.fliplr"] == "Flip array in the left/right direction"
    assert by_title["scipy.stats.norm"].metadata["kind"] == "distribution"
    assert by_title["optax.MultiSteps"].metadata["kind"] == "class"


def test_links_resolve_from_the_page_outwards(by_title):
    assert "jax.numpy.linalg.svd" not in by_title["numpy.linalg.svd"].metadata["see_also"]
    assert "scipy.linalg.svd" in by_title["numpy.linalg.svd"].metadata["see_also"]
    assert "jax.numpy.triu" in by_title["jax.numpy.tril"].metadata["see_also"]


def test_loading_is_silent_repeatable_and_starts_no_backend(documents):
    code = (
        "import hashlib, warnings\n"
        "warnings.simplefilter('error')\n"
        "from searchrl_jax.data.pydocs import load_documents\n"
        "import sys; assert 'jax' not in sys.modules\n"
        "documents = load_documents()\n"
        "from jax._src import xla_bridge; assert not xla_bridge._backends\n"
        "print(hashlib.sha256(repr(documents).encode()).hexdigest())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == hashlib.sha256(repr(documents).encode()).hexdigest()


def test_show_prints_counts_and_examples(capsys):
    main(["--show", "2"])
    printed = capsys.readouterr().out
    for word in ("known_item", "bridge", "pointed_bridge", "train", "validation", "test"):
        assert word in printed
    assert printed.count("\n- ") == 6


@pytest.mark.parametrize("arguments", [["--show", "0"], ["--show", "many"], ["--shew", "5"]])
def test_bad_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err
