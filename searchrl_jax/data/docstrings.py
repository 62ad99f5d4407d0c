"""Plain text and links out of docstrings, in the two styles that the numeric packages use (numpydoc and Google)."""

import re
from collections.abc import Iterator

_ROLE = re.compile(r":(?:[a-z]+:)?[a-z]+:`([^`]*)`")
_HYPERLINK = re.compile(r"`([^`<]+?)\s*<[^>`]+>`_{0,2}")
_FOOTNOTE = re.compile(r"\s*\[[\w*]+\]_")
# "JAX implementation of :func:`numpy.add`." is said on nearly every page of jax.numpy and tells nothing about this one.
_IMPLEMENTATION_SENTENCE = re.compile(r"(?<=\n\n)(?:LAX-backend|JAX) implementation of [\w.]+\.?[ ]*(?:\n+|\Z)")

# SciPy prints a set of argument names into some of these, in an order that differs from run to run.
_DEPRECATION = re.compile(r"^([ \t]*)\.\. deprecated::.*\n(?:\1[ \t]+.*\n|[ \t]*\n)*", re.M)

# A full stop ends a sentence where a capital follows, unless one of these abbreviations carries it.
_SENTENCE = re.compile(r"(.+?[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)(?<!cf\.)(?<!resp\.)\s+(?=[A-Z\[(])")

_SEE_ALSO_HEADING = re.compile(r"see also:?", re.I)
_SEE_ALSO_INLINE = re.compile(r"(?:\.\. seealso::|see also:)\s*(.*)", re.I)
_RULE = re.compile(r"[-=]{3,}")

_NAME = r"(?::[a-z:]+:)?`{0,2}[~!]?([A-Za-z_][\w.]*)(?:\(\))?`{0,2}"
_ITEM = re.compile(rf"(?:[-*]\s+)?(?P<names>{_NAME}(?:\s*,\s*{_NAME})*),?\s*(?::\s+(?P<description>.*)|:)?\.?")
_LINK_ROLE = re.compile(r":(?:py:)?(?:func|class|meth|obj|attr|data):`[~!]?([\w.]+)`")


def _role_text(match: re.Match[str]) -> str:
    inner = match.group(1).strip()
    if "<" in inner and inner.endswith(">"):
        return inner[: inner.index("<")].strip()
    if inner.startswith("~"):
        return inner.rpartition(".")[2].lstrip("~")
    return inner.lstrip("!")


def clean(text: str) -> str:
    """Docstring text without Sphinx's mark-up: roles, hyperlinks, footnote marks and literal quotes.

    The words and the line structure stay as they were written, but for deprecation notices and for the sentence "JAX
    implementation of numpy.add." where it is a paragraph of its own after the summary.
    """
    text = _DEPRECATION.sub("", text)
    text = _HYPERLINK.sub(r"\1", _ROLE.sub(_role_text, text))
    text = _FOOTNOTE.sub("", re.sub(r"(?<=\w)`_{1,2}", "`", text)).replace("`", "")
    text = _IMPLEMENTATION_SENTENCE.sub("", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def first_sentence(text: str) -> str:
    """The first sentence of the first paragraph, on one line, without its full stop."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    match = _SENTENCE.match(paragraph)
    return (match.group(1) if match else paragraph).strip().rstrip(".:;, ")


def without_signature(docstring: str, names: set[str]) -> str:
    """The docstring from its summary on.

    C functions and dataclasses put a call signature first; directives and ruled headings may stand there too.

    Args:
        docstring: as `inspect.getdoc` gives it.
        names: last components of the object's names, by which a signature is told from a sentence with brackets.
    """
    paragraphs = re.split(r"\n[ \t]*\n", docstring.strip())
    while paragraphs:
        head = paragraphs[0].strip()
        called = re.match(r"([\w.]+)\s*\(", head)
        if called and called.group(1).rpartition(".")[2] in names:
            paragraphs[0] = _after_brackets(head)
            if paragraphs[0]:
                continue
        elif head and not head.startswith("..") and not re.fullmatch(r"[=\-~]+", head):
            break
        paragraphs = paragraphs[1:]
    return "\n\n".join(paragraphs)


def _after_brackets(paragraph: str) -> str:
    """What follows the line on which the first bracket is closed."""
    depth = 0
    lines = paragraph.splitlines()
    for index, line in enumerate(lines):
        depth += line.count("(") - line.count(")")
        if depth <= 0:
            return "\n".join(lines[index + 1 :]).strip()
    return ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def without_printed_output(docstring: str) -> str:
    """The docstring without what its `>>>` examples print: numbers that say nothing in words, and that SciPy draws anew
    in each process on some pages. The code stays: it says the page's name, by which a search finds it.
    """
    kept: list[str] = []
    in_example = False
    for line in docstring.splitlines():
        stripped = line.strip()
        if stripped.startswith((">>>", "...")):
            in_example = in_example or stripped.startswith(">>>")
        elif in_example and stripped:
            continue
        else:
            in_example = False
        kept.append(line)
    return "\n".join(kept)


def _is_rule(lines: list[str], index: int) -> bool:
    return index < len(lines) and _RULE.fullmatch(lines[index].strip()) is not None


def _see_also_blocks(lines: list[str]) -> Iterator[list[str]]:
    for index, line in enumerate(lines):
        if _SEE_ALSO_HEADING.fullmatch(line.strip()) and _is_rule(lines, index + 1):
            stop = index + 2
            while stop < len(lines) and not (lines[stop].strip() and _is_rule(lines, stop + 1)):
                stop += 1
            yield lines[index + 2 : stop]
            continue
        inline = _SEE_ALSO_INLINE.fullmatch(line.strip())
        if inline:
            stop = index + 1
            while stop < len(lines) and (not lines[stop].strip() or _indent(lines[stop]) > _indent(line)):
                stop += 1
            yield [inline.group(1), *lines[index + 1 : stop]]


def parse_see_also(docstring: str) -> list[tuple[str, str]]:
    """(name as written, first sentence of its description or "") of each See Also link, in page order.

    Both styles are read: numpydoc's underlined section with `name : description` items (or the description indented
    on the next line), and the `See also:` block or `.. seealso::` directive with `:func:` roles. Of prose in such a
    section only the roles count.
    """
    found: dict[str, str] = {}
    for block in _see_also_blocks(docstring.splitlines()):
        items: list[tuple[int, list[str], list[str]]] = []  # (indent, names, lines of their description)
        for line in filter(str.strip, block):
            match = _ITEM.fullmatch(line.strip())
            if items and _indent(line) > items[-1][0]:
                items[-1][2].append(line.strip())
            elif match:
                described = [match.group("description")] if match.group("description") else []
                items.append((_indent(line), re.findall(_NAME, match.group("names")), described))
            elif names := _LINK_ROLE.findall(line):
                items.append((_indent(line), names, []))
        for _, names, lines in items:
            description = first_sentence(clean(" ".join(lines))) if lines else ""
            for name in names:
                found[name] = found.get(name) or description
    return list(found.items())
