"""The embedded corpus: the reference pages of the installed numpy, scipy, jax, optax and flax.

`load_documents` reads the docstrings; `load_tasks` (in `questions.py`) asks about them. Nothing is downloaded.

    python -m searchrl_jax.data.pydocs --show 5    # counts, and five examples of each kind of question
"""

import argparse
import importlib
import importlib.util
import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from searchrl_jax.data.docstrings import (
    clean,
    first_sentence,
    parse_see_also,
    without_printed_output,
    without_signature,
)
from searchrl_jax.data.questions import SLICES, load_tasks
from searchrl_jax.data.schema import Document, Task

__all__ = ["MODULES", "load_documents", "load_tasks"]

# The public modules, written out: a walk over the file system finds deprecated and private ones too, and a walk over
# attributes depends on what else the process has imported, so that the corpus would not be the same everywhere.
# A module that another version of a package lacks is left out.
MODULES: Mapping[str, str] = {
    "numpy": """
        char ctypeslib dtypes exceptions fft lib lib.array_utils lib.introspect lib.mixins lib.npyio lib.recfunctions
        lib.scimath lib.stride_tricks linalg ma polynomial polynomial.chebyshev polynomial.hermite polynomial.hermite_e
        polynomial.laguerre polynomial.legendre polynomial.polynomial polynomial.polyutils random rec strings""",
    "scipy": """
        cluster.hierarchy cluster.vq constants datasets differentiate fft fftpack integrate interpolate io io.arff
        io.matlab io.wavfile linalg linalg.interpolative ndimage optimize optimize.elementwise signal signal.windows
        sparse sparse.csgraph sparse.linalg spatial spatial.distance spatial.transform special stats stats.contingency
        stats.mstats stats.qmc stats.sampling""",
    "jax": """
        ad_checkpoint custom_batching custom_derivatives debug distributed dlpack dtypes errors experimental.checkify
        experimental.custom_partitioning experimental.jet experimental.mesh_utils experimental.multihost_utils
        experimental.ode experimental.pallas experimental.pjit experimental.rnn experimental.shard_map
        experimental.sparse export ffi flatten_util image lax lax.linalg monitoring nn nn.initializers numpy numpy.fft
        numpy.linalg ops profiler random scipy scipy.cluster.vq scipy.fft scipy.integrate scipy.interpolate scipy.linalg
        scipy.ndimage scipy.optimize scipy.signal scipy.sparse.linalg scipy.spatial.transform scipy.special scipy.stats
        scipy.stats.bernoulli scipy.stats.beta scipy.stats.betabinom scipy.stats.binom scipy.stats.cauchy
        scipy.stats.chi2 scipy.stats.dirichlet scipy.stats.expon scipy.stats.gamma scipy.stats.gennorm scipy.stats.geom
        scipy.stats.gumbel_l scipy.stats.gumbel_r scipy.stats.laplace scipy.stats.logistic scipy.stats.multinomial
        scipy.stats.multivariate_normal scipy.stats.nbinom scipy.stats.norm scipy.stats.pareto scipy.stats.poisson
        scipy.stats.t scipy.stats.truncnorm scipy.stats.uniform scipy.stats.vonmises scipy.stats.wrapcauchy sharding
        stages tree tree_util typing""",
    "optax": """
        assignment contrib losses perturbations projections schedules second_order transforms tree tree_utils""",
    "flax": """
        core core.frozen_dict core.meta errors jax_utils linen linen.initializers linen.spmd nnx serialization struct
        training.common_utils training.dynamic_scale training.early_stopping training.lr_schedule training.train_state
        traverse_util""",
}

# Objects that a public module holds but that another project documents (typing, functools, ...) are no pages of ours.
_FAMILY = frozenset({*MODULES, "jaxlib"})

_MINIMUM_WORDS = 20  # below this a docstring is a stub ("See numpy.add.") that no question can single out


@dataclass
class _Page:
    """One documented object under all of its public names."""

    names: list[str]
    obj: Any
    docstring: str
    text: str = ""
    links: list[tuple[str, str]] = field(default_factory=list)  # (title of the linked page, description or "")

    @property
    def title(self) -> str:
        """The shortest public name; of equally short ones the first in the alphabet."""
        return min(self.names, key=lambda name: (len(name), name))

    def cleaned_text(self) -> str:
        """The docstring as a person would read it, from its summary on."""
        last_names = {name.rpartition(".")[2] for name in self.names} | {str(getattr(self.obj, "__name__", ""))}
        return clean(without_signature(without_printed_output(self.docstring), last_names))


def _public_objects(module_name: str) -> list[tuple[str, Any]]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(module_name)
        # A deprecated name warns when it is read: as an error that is the sign to leave it out.
        warnings.simplefilter("error")
        for name in sorted(set(getattr(module, "__all__", None) or dir(module))):
            if name.startswith("_"):
                continue
            try:
                found.append((f"{module_name}.{name}", getattr(module, name)))
            except (AttributeError, ImportError, Warning):
                continue
    return found


def _own_docstring(obj: Any) -> str:
    """The docstring written for this very object, or "" (a class that inherits its base's, an instance its type's)."""
    if isinstance(obj, ModuleType) or not callable(obj):
        return ""
    homes = {str(getattr(obj, "__module__", "")).partition(".")[0], type(obj).__module__.partition(".")[0]}
    if not homes & _FAMILY:
        return ""
    own = vars(obj).get("__doc__") if inspect.isclass(obj) else getattr(obj, "__doc__", None)
    if not isinstance(own, str) or own == type(obj).__doc__:
        return ""
    return inspect.cleandoc(own)


def _collect_pages() -> list[_Page]:
    by_object: dict[int, _Page] = {}
    objects: list[tuple[str, Any]] = []
    for package, suffixes in MODULES.items():
        for module_name in [package, *(f"{package}.{suffix}" for suffix in suffixes.split())]:
            if importlib.util.find_spec(module_name) is None:
                continue
            objects += _public_objects(module_name)
    # Read when all modules are there: SciPy, imported, adds to docstrings of NumPy.
    for name, obj in objects:
        if id(obj) in by_object:
            by_object[id(obj)].names.append(name)
        elif docstring := _own_docstring(obj):
            by_object[id(obj)] = _Page([name], obj, docstring)
    by_text: dict[str, _Page] = {}
    for page in by_object.values():
        page.text = page.cleaned_text()
        if page.text in by_text:
            by_text[page.text].names.extend(page.names)
        elif len(page.text.split()) >= _MINIMUM_WORDS:
            by_text[page.text] = page
    return sorted(by_text.values(), key=lambda page: page.title)


class _Names:
    """Finds the page that a See Also name means, seen from the page that it was written on."""

    def __init__(self, pages: Sequence[_Page]) -> None:
        self._title_of = {name: page.title for page in pages for name in page.names}
        self._by_suffix: dict[tuple[str, str], set[str]] = defaultdict(set)
        for name, title in self._title_of.items():
            parts = name.split(".")
            for start in range(1, len(parts)):
                self._by_suffix[parts[0], ".".join(parts[start:])].add(title)

    def resolve(self, name: str, page: _Page) -> str | None:
        """The title of the linked page: by its full name, else from the page's own modules outwards, else the only page
        of the package whose name ends so. None where the name is unknown or could mean several pages.
        """
        if name in self._title_of:
            return self._title_of[name]
        for own in [page.title, *sorted(page.names)]:
            module = own
            while "." in module:
                module = module.rpartition(".")[0]
                if f"{module}.{name}" in self._title_of:
                    return self._title_of[f"{module}.{name}"]
        fits = self._by_suffix.get((page.title.partition(".")[0], name), set())
        return next(iter(fits)) if len(fits) == 1 else None


def _link(pages: Sequence[_Page]) -> None:
    names = _Names(pages)
    for page in pages:
        links: dict[str, str] = {}
        for name, description in parse_see_also(page.docstring):
            title = names.resolve(name, page)
            if title is not None and title != page.title:
                links[title] = links.get(title) or description
        page.links = list(links.items())


def _signature(page: _Page) -> str:
    """The call signature, or "" where Python knows none.

    Only plain defaults are written out: others print memory addresses, which differ from run to run.
    """
    try:
        parameters = inspect.signature(page.obj).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in shown):
            shown.append("*")
        stars = 1 if parameter.kind is parameter.VAR_POSITIONAL else 2 if parameter.kind is parameter.VAR_KEYWORD else 0
        text = "*" * stars + parameter.name
        if parameter.default is not parameter.empty:
            is_plain = parameter.default is None or type(parameter.default) in (bool, int, float, str)
            text += f"={parameter.default!r}" if is_plain else "=..."
        shown.append(text)
    return f"{page.title.rpartition('.')[2]}({', '.join(shown)})"


def _kind(obj: Any) -> str:
    if inspect.isclass(obj):
        return "class"
    is_distribution = type(obj).__module__.startswith("scipy.stats.")
    return "distribution" if is_distribution else "function"


def load_documents() -> list[Document]:
    """The embedded corpus: one document per distinct reference page, sorted by title.

    Names of one object, and objects with the same text, make one page. Methods are left out: most only refer to the
    function of the same name. Importing the packages starts no JAX backend.

    Returns:
        Documents whose `doc_id` is their title, the shortest public name. `text` is the cleaned docstring from its
        summary on, without printed output. Metadata: `package`, `module`, `kind` ("function", "class" or
        "distribution"), `signature` ("" where Python knows none), `aliases` (the other public names), `summary` (the
        first sentence), `see_also` (titles of the linked pages that exist, in page order) and `see_also_text` (what is
        said of each, or "").
    """
    pages = _collect_pages()
    _link(pages)
    documents = []
    for page in pages:
        metadata = {
            "package": page.title.partition(".")[0],
            "module": page.title.rpartition(".")[0],
            "kind": _kind(page.obj),
            "signature": _signature(page),
            "aliases": sorted(set(page.names) - {page.title}),
            "summary": first_sentence(page.text),
            "see_also": [title for title, _ in page.links],
            "see_also_text": [description for _, description in page.links],
        }
        documents.append(Document(doc_id=page.title, text=page.text, title=page.title, metadata=metadata))
    return documents


def _print_report(documents: Sequence[Document], tasks: Mapping[str, Sequence[Task]], show: int) -> None:
    console = Console(highlight=False)
    packages = Counter(document.metadata["package"] for document in documents)
    links = [description for document in documents for description in document.metadata["see_also_text"]]
    sizes = ", ".join(f"{name} {count:,}" for name, count in packages.items())
    console.print(f"{len(documents):,} pages ({sizes}); {len(links):,} links, {sum(map(bool, links)):,} described")

    table = Table("questions", *SLICES, "all")
    for split, rows in tasks.items():
        counts = Counter(task.metadata["slice"] for task in rows)
        table.add_row(split, *(f"{counts[name]:,}" for name in SLICES), f"{len(rows):,}")
    console.print(table)

    for name in SLICES:
        rows = [task for task in tasks["train"] if task.metadata["slice"] == name]
        console.print(f"\n[bold]{name}[/bold]")
        for task in rows[:: max(1, len(rows) // show)][:show]:
            console.print(f"- {task.query}", markup=False)
            answers = ", ".join(f"{doc_id} ({grade:g})" for doc_id, grade in task.relevance.items())
            console.print(f"  {answers}", style="green", markup=False)


def _parse_arguments(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m searchrl_jax.data.pydocs", description=main.__doc__)
    parser.add_argument("--show", type=int, default=3, metavar="N", help="training examples of each kind (default 3)")
    show = parser.parse_args(arguments).show
    if show < 1:
        parser.error(f"--show must be at least 1, got {show}")
    return int(show)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the counts of the corpus and of its questions, and examples of each kind."""
    show = _parse_arguments(arguments)
    documents = load_documents()
    _print_report(documents, load_tasks(documents), show)


if __name__ == "__main__":
    main()
