"""What the policy reads after a search."""

import pytest

from searchrl_jax.data.schema import Document
from searchrl_jax.env.observations import ObservationFormat, References, render_hits

POLYFIT = Document(
    "numpy.polyfit",
    "Least squares polynomial fit.\n\nFit a polynomial of degree deg.",
    "numpy.polyfit",
    {"see_also": ["numpy.polyval", "numpy.poly1d", "numpy.roots"]},
)
ROOTS = Document("numpy.roots", "Return the roots of a polynomial.", "numpy.roots")
ECLIPSE = Document("d7", "The moon hides\tthe sun.", "Solar\neclipse", {"see_also": ["Lunar  eclipse", "Moon"]})


def layout(words=4, see_also=2, tokens=100, short_repeats=True):
    return ObservationFormat(words, see_also, tokens, short_repeats, lambda text: len(text.split()))


def test_hits_are_lines_of_reference_title_text_and_links():
    text, shown = render_hits("q", [POLYFIT, ROOTS, ECLIPSE], References(), (), layout())
    assert text.split("\n") == [
        "[1] numpy.polyfit: Least squares polynomial fit. See 1: numpy.polyval + poly1d",
        "[2] numpy.roots: Return the roots of",
        "[3] Solar eclipse: The moon hides the See 3: Lunar eclipse ; Moon",
    ]
    assert shown == ("numpy.polyfit", "numpy.roots", "d7")


def test_a_document_keeps_its_number_and_is_short_when_repeated():
    references = References()
    render_hits("q", [POLYFIT], references, (), layout())
    text, _ = render_hits("q", [ROOTS, POLYFIT], references, (), layout())
    assert text == "[2] numpy.roots: Return the roots of\n[1] numpy.polyfit\norder:1,2"
    text, _ = render_hits("q", [POLYFIT], references, (), layout(short_repeats=False))
    assert text.startswith("[1] numpy.polyfit: Least")
    assert references.doc_ids == ["numpy.polyfit", "numpy.roots"]
    assert [references.doc_id(n) for n in (-1, 0, 1, 2, 3)] == [None, None, "numpy.polyfit", "numpy.roots", None]


def test_the_leader_of_the_ranking_stands_before_the_next_results_and_is_none_of_them():
    references = References()
    render_hits("q", [POLYFIT], references, (), layout())
    assert references.best("q", ["numpy.roots"], 1) == "numpy.polyfit"
    assert references.best("new", ["numpy.roots"]) == "numpy.roots"
    text, shown = render_hits("q", [ROOTS], references, (), layout(), leader=POLYFIT, skipped=1)
    assert text == "[1] numpy.polyfit\n[2] numpy.roots: Return the roots of\norder:1,2"
    assert shown == ("numpy.roots",)
    # Room for one line and the order: the hit is what was asked for.
    long = Document("d", "word", " ".join(f"word{i}" for i in range(14)))
    text, shown = render_hits("q", [long], references, (), layout(tokens=17), leader=POLYFIT, skipped=2)
    assert text.startswith("[3] word0") and shown == ("d",)


def test_the_budget_holds_and_only_what_is_shown_gets_a_number():
    many = [Document(f"d{i}", "word " * 50, f"name{i}") for i in range(20)]
    for tokens in range(16, 60):
        references = References()
        fitting = layout(words=8, tokens=tokens)
        text, shown = render_hits("q", many, references, (), fitting)
        assert fitting.count_tokens(text) <= tokens
        assert references.doc_ids == list(shown) == [f"d{i}" for i in range(len(shown))]
        assert text.count("[") == len(shown) > 0


def test_from_the_second_search_on_a_line_ranks_all_that_was_shown():
    a, b, c = (Document(name, "text", name) for name in "abc")
    references = References()
    assert "order" not in render_hits("q", [a, b], references, (), layout())[0]
    assert references.ranking == ["a", "b"]
    text, _ = render_hits("new", [c, b], references, (), layout())
    assert text.endswith("\norder:3,2,1")
    # c: 1/6; b: 1/7 of this search and a tenth of 1/7; a: a tenth of 1/6
    assert references.scores == pytest.approx({"a": 1 / 60, "b": 1 / 70 + 1 / 7, "c": 1 / 6})
    assert references.ranking == ["c", "b", "a"]
    text, _ = render_hits("newer", [a], references, (), layout())
    assert text.endswith("\norder:1,3,2")  # 1/600 + 1/6, 1/60, 1/700 + 1/70


def test_the_same_query_to_another_tool_counts_as_much():
    a, b, c = (Document(name, "text", name) for name in "abc")
    references = References()
    render_hits("q", [a, b], references, (), layout())
    text, _ = render_hits("q", [c, b], references, (), layout())
    assert text.endswith("\norder:2,1,3")
    assert references.scores == pytest.approx({"a": 1 / 6, "b": 2 / 7, "c": 1 / 6})


def test_a_query_asked_before_puts_its_later_results_behind_its_first_ones():
    documents = [Document(name, "text", name) for name in "abcd"]
    references = References()
    render_hits("q", documents[:1], references, (), layout())
    render_hits("new", documents[1:2], references, (), layout())
    text, _ = render_hits("q", documents[2:], references, (), layout(), skipped=4)
    assert text.endswith("\norder:2,3,4,1")  # 1/6, 1/10, 1/11, 1/60
    assert references.scores == pytest.approx({"a": 1 / 60, "b": 1 / 6, "c": 1 / 10, "d": 1 / 11})


def test_later_results_of_a_query_rank_below_its_first_ones():
    a, b, c = (Document(name, "text", name) for name in "abc")
    references = References()
    render_hits("q", [a, b], references, (), layout())
    text, _ = render_hits("q", [c], references, (), layout(), skipped=2)
    assert text.endswith("\norder:1,2,3")
    assert references.scores == pytest.approx({"a": 1 / 6, "b": 1 / 7, "c": 1 / 8})
    assert render_hits("q", [], references, (), layout(), skipped=3) == ("no more results", ())


def test_the_line_of_the_order_names_ten_and_keeps_within_the_budget():
    many = [Document(f"d{i}", "word", f"name{i}") for i in range(20)]
    for tokens in range(16, 40):
        references = References()
        fitting = ObservationFormat(1, 0, tokens, True, lambda text: len(text.replace(",", " ").split()))
        for start in (0, 8):
            text, shown = render_hits("q", many[start : start + 12], references, (), fitting)
            assert fitting.count_tokens(text) <= tokens and shown
        order = text.split("order:")[1].split(",")
        assert len(order) == min(10, len(references.doc_ids))


def test_a_hit_cut_to_its_title_is_described_when_it_fits():
    references = References()
    text, _ = render_hits("q", [POLYFIT, ROOTS], references, (), layout(words=9, tokens=18))
    assert text.split("\n")[1] == "[2] numpy.roots"
    text, _ = render_hits("q", [ROOTS], references, (), layout())
    assert text == "[2] numpy.roots: Return the roots of\norder:2,1"


def test_a_name_is_shortened_by_the_parent_of_the_name_before_it():
    links = ["numpy.polyval", "numpy.poly1d", "numpy.ma.polyfit", "numpy.roots", "roots", "poly"]
    text, _ = render_hits(
        "q", [Document("d", "text", "name", {"see_also": links})], References(), (), layout(words=0, see_also=9)
    )
    assert (
        text.split("\n")[0] == "[1] name See 1: numpy.polyval + poly1d & numpy.ma.polyfit / numpy.roots + roots & poly"
    )


def test_nothing_found_and_nothing_that_fits_are_said():
    assert render_hits("q", [], References(), (), layout()) == ("no results", ())
    long = Document("d", "text", "word " * 40)
    references = References()
    assert render_hits("q", [long], references, (), layout())[0].startswith("[1] word word")
    text, shown = render_hits("q", [long], References(), (), layout(tokens=16))
    assert (text, shown) == ("the results are too long to show", ())


def test_excluded_names_are_not_among_the_links():
    text, _ = render_hits("q", [POLYFIT], References(), {"numpy.polyval"}, layout())
    assert text.endswith("See 1: numpy.poly1d + roots")


def test_no_words_and_no_links_leave_the_title():
    assert render_hits("q", [POLYFIT], References(), (), layout(words=0, see_also=0))[0] == "[1] numpy.polyfit"


@pytest.mark.parametrize("bad", [{"words": -1}, {"see_also": -1}, {"tokens": 15}])
def test_bad_formats_are_refused(bad):
    with pytest.raises(ValueError, match="expected observation"):
        layout(**bad)
