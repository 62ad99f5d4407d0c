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
    text, shown = render_hits([POLYFIT, ROOTS, ECLIPSE], References(), (), layout())
    assert text.split("\n") == [
        "[1] numpy.polyfit: Least squares polynomial fit. See numpy.polyval poly1d",
        "[2] numpy.roots: Return the roots of",
        "[3] Solar eclipse: The moon hides the See Lunar eclipse ; Moon",
        "order:1,2,3",
    ]
    assert shown == ("numpy.polyfit", "numpy.roots", "d7")


def test_a_document_keeps_its_number_and_is_short_when_repeated():
    references = References()
    render_hits([POLYFIT], references, (), layout())
    text, _ = render_hits([ROOTS, POLYFIT], references, (), layout())
    assert text == "[2] numpy.roots: Return the roots of\n[1] numpy.polyfit\norder:2,1"
    text, _ = render_hits([POLYFIT], references, (), layout(short_repeats=False))
    assert text.startswith("[1] numpy.polyfit: Least")
    assert references.doc_ids == ["numpy.polyfit", "numpy.roots"]
    assert [references.doc_id(n) for n in (-1, 0, 1, 2, 3)] == [None, None, "numpy.polyfit", "numpy.roots", None]


def test_the_budget_holds_and_only_what_is_shown_gets_a_number():
    many = [Document(f"d{i}", "word " * 50, f"name{i}") for i in range(20)]
    for tokens in range(16, 60):
        references = References()
        fitting = layout(words=8, tokens=tokens)
        text, shown = render_hits(many, references, (), fitting)
        assert fitting.count_tokens(text) <= tokens
        assert references.doc_ids == list(shown) == [f"d{i}" for i in range(len(shown))]
        assert text.count("[") == len(shown) > 0


def test_a_hit_cut_to_its_title_is_described_when_it_fits():
    references = References()
    text, _ = render_hits([POLYFIT, ROOTS], references, (), layout(words=9, tokens=17))
    assert text.split("\n")[1] == "[2] numpy.roots"
    text, _ = render_hits([ROOTS], references, (), layout())
    assert text == "[2] numpy.roots: Return the roots of\norder:2"


def test_a_name_is_shortened_by_the_parent_of_the_name_before_it():
    links = ["numpy.polyval", "numpy.poly1d", "numpy.ma.polyfit", "numpy.roots", "roots", "poly"]
    text, _ = render_hits(
        [Document("d", "text", "name", {"see_also": links})], References(), (), layout(words=0, see_also=9)
    )
    assert text.split("\n")[0] == "[1] name See numpy.polyval poly1d numpy.ma.polyfit numpy.roots roots poly"


def test_nothing_found_and_nothing_that_fits_are_said():
    assert render_hits([], References(), (), layout()) == ("no results", ())
    long = Document("d", "text", "word " * 40)
    references = References()
    assert render_hits([long], references, (), layout())[0].startswith("[1] word word")
    text, shown = render_hits([long], References(), (), layout(tokens=16))
    assert (text, shown) == ("the results are too long to show", ())


def test_excluded_names_are_not_among_the_links():
    text, _ = render_hits([POLYFIT], References(), {"numpy.polyval"}, layout())
    assert text.endswith("See numpy.poly1d roots\norder:1")


def test_no_words_and_no_links_leave_the_title():
    assert render_hits([POLYFIT], References(), (), layout(words=0, see_also=0))[0] == "[1] numpy.polyfit\norder:1"


@pytest.mark.parametrize("bad", [{"words": -1}, {"see_also": -1}, {"tokens": 15}])
def test_bad_formats_are_refused(bad):
    with pytest.raises(ValueError, match="expected observation"):
        layout(**bad)
