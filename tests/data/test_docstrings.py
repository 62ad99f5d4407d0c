import textwrap

import pytest

from searchrl_jax.data.docstrings import (
    clean,
    first_sentence,
    parse_see_also,
    without_printed_output,
    without_signature,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Like :func:`numpy.add`, or :obj:`~jax.lax.add`.", "Like numpy.add, or add."),
        ("See :ref:`the guide <guide>` and `the paper <https://x.org/a>`_.", "See the guide and the paper."),
        ("With ``axis=0`` and `x` [1]_ too.", "With axis=0 and x too."),
        (r"A :math:`U^H U = I` matrix.", "A U^H U = I matrix."),
        ("Add.\n\nJAX implementation of :obj:`numpy.add`.\n\n\n\nArgs:\n  x: array", "Add.\n\nArgs:\n  x: array"),
        ("Add.\n\n.. deprecated:: 1.0\n    Use\n\n    that.\n\nMore.", "Add.\n\nMore."),
        ("JAX implementation of :obj:`numpy.add`.", "JAX implementation of numpy.add."),
    ],
)
def test_clean(text, expected):
    assert clean(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return x. Then more.\n\nMore.", "Return x"),
        ("Return x, e.g. The one\nthat you want. Then more.", "Return x, e.g. The one that you want"),
        ("Return x with decay 0.5 per step.", "Return x with decay 0.5 per step"),
        ("One line without a stop\n\nAnother.", "One line without a stop"),
    ],
)
def test_first_sentence(text, expected):
    assert first_sentence(text) == expected


def test_signatures_and_directives_before_the_summary_go():
    assert without_signature("add(x1, x2, /,\n    out=None)\n\nAdd them.\n\nMore.", {"add"}) == "Add them.\n\nMore."
    assert without_signature("add(x1)\nAdd them.", {"add"}) == "Add them."
    assert without_signature(".. deprecated:: 1.0\n    Use b.\n\nAdd them.", {"add"}) == "Add them."
    assert without_signature("Point(x: int, y: int)", {"Point"}) == ""
    # Another name with brackets is the start of a sentence.
    assert without_signature("log(1 + x), exactly.", {"log1p"}) == "log(1 + x), exactly."


def test_numpydoc_section():
    docstring = textwrap.dedent(
        """
        Return a.

        See Also
        --------
        polyval : Compute polynomial values.  Another sentence.
        linalg.lstsq, numpy.dot
        :func:`~numpy.ndarray.sort` : Sort
            an array in place.
        fft
            The forward transform.
        ... and a sentence that mentions :func:`numpy.sum` and ``not this``.

        Notes
        -----
        other : Not a link.
        """
    )
    assert parse_see_also(docstring) == [
        ("polyval", "Compute polynomial values"),
        ("linalg.lstsq", ""),
        ("numpy.dot", ""),
        ("numpy.ndarray.sort", "Sort an array in place"),
        ("fft", "The forward transform"),
        ("numpy.sum", ""),
    ]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "See also:\n  - :func:`jax.numpy.max`: largest\n    of them.\n  - :func:`min`\n\nArgs:\n  :func:`no`: x",
            [("jax.numpy.max", "largest of them"), ("min", "")],
        ),
        ("See Also:\n  :func:`relu6`, :func:`elu`.\n\nMore.", [("relu6", ""), ("elu", "")]),
        (".. seealso:: :func:`optax.nadam`, :func:`optax.adamw`.", [("optax.nadam", ""), ("optax.adamw", "")]),
        (".. seealso::\n  See :func:`optax.adam` for more.\n\n:func:`no`", [("optax.adam", "")]),
        ("Prose may see also: nothing.\n", []),
    ],
)
def test_google_section_and_directive(section, expected):
    assert parse_see_also(f"Return a.\n\n{section}") == expected


def test_a_name_listed_twice_keeps_its_description():
    assert parse_see_also("See Also\n--------\na\na : The first.\na : The second.\n") == [("a", "The first")]


def test_printed_output_goes_and_code_and_prose_stay():
    docstring = (
        "Add.\n\n>>> x = [\n...   1]\n>>> add(x, 2)\narray([0.31])\n[more]\n\nProse.\n\n... and so on\nto the end."
    )
    expected = "Add.\n\n>>> x = [\n...   1]\n>>> add(x, 2)\n\nProse.\n\n... and so on\nto the end."
    assert without_printed_output(docstring) == expected
