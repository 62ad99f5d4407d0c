"""A dozen linked documents, tasks over them, a tokenizer, an environment and a decoder, each as small as it can be."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from searchrl_jax.data.schema import Document, Task
from searchrl_jax.env import Limits, SearchEnv
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params, init_params
from searchrl_jax.retrieval import Retriever, build_index
from searchrl_jax.text.hermes import HermesDialect, call_scaffolds
from searchrl_jax.text.tokenizer import Tokenizer, train_tokenizer

TOOLS = ("bm25_search", "vector_search")

# name: (what it does, the names its page points to)
_PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "apple": ("Peel a red fruit.", ("pear", "plum")),
    "pear": ("Slice a green fruit.", ("apple",)),
    "plum": ("Dry a blue fruit.", ("apple", "grape")),
    "grape": ("Press a bunch of berries.", ("plum",)),
    "oak": ("Saw a hard trunk.", ("pine", "birch")),
    "pine": ("Tap a resinous trunk.", ("oak",)),
    "birch": ("Strip a white bark.", ("oak", "pine")),
    "river": ("Measure a running water.", ("lake", "brook")),
    "lake": ("Sound a standing water.", ("river",)),
    "brook": ("Dam a narrow water.", ("river", "lake")),
    "wind": ("Catch a moving air.", ("storm",)),
    "storm": ("Weather a violent air.", ("wind", "river")),
}


def tiny_documents() -> list[Document]:
    """Twelve documents `tiny.NAME` that point to each other by `see_also`."""
    return [
        Document(
            doc_id=f"tiny.{name}",
            text=summary,
            title=f"tiny.{name}",
            metadata={"summary": summary, "see_also": [f"tiny.{other}" for other in links]},
        )
        for name, (summary, links) in _PAGES.items()
    ]


def tiny_tasks() -> list[Task]:
    """Two tasks for each document: find it by what it does, and find the pages that its page points to."""
    tasks = []
    for name, (summary, links) in _PAGES.items():
        what = summary.rstrip(".").lower()
        known = {"slice": "known_item", "description": what}
        tasks.append(Task(f"known-{name}", f"Which page says how to {what}?", {f"tiny.{name}": 1.0}, metadata=known))
        relevance = {f"tiny.{other}": 2.0 for other in links} | {f"tiny.{name}": 1.0}
        bridge = {"slice": "bridge", "description": what, "via": f"tiny.{name}"}
        tasks.append(
            Task(f"bridge-{name}", f"What does the page that says how to {what} point to?", relevance, metadata=bridge)
        )
    return tasks


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A tokenizer trained on the tiny documents and questions; `vocab_size` is at least 272."""
    texts = [f"{document.title}: {document.text}" for document in tiny_documents()]
    return train_tokenizer([*texts, *(task.query for task in tiny_tasks())], vocab_size, call_scaffolds(TOOLS))


def tiny_dialect() -> HermesDialect:
    """The dialect over `tiny_tokenizer`."""
    return HermesDialect(tiny_tokenizer())


def tiny_env(
    dialect: HermesDialect,
    limits: Limits | None = None,
    retrievers: Mapping[str, Retriever] | None = None,
    documents: Sequence[Document] | None = None,
    keep_observations: int = 0,
) -> SearchEnv:
    """An environment over the tiny documents.

    Args:
        limits: 4 turns, 24 tokens per turn and 400 per episode where None.
        retrievers: by tool name; where None both tools of `TOOLS` are BM25, which needs no encoder.
    """
    documents = tiny_documents() if documents is None else documents
    if retrievers is None:
        index = build_index(documents, kind="bm25")
        retrievers = dict.fromkeys(TOOLS, index)
    return SearchEnv(
        retrievers,
        documents,
        limits or Limits(max_turns=4, max_tokens_per_turn=24, max_tokens_per_episode=400),
        results=3,
        observation_tokens=96,
        see_also=2,
        keep_observations=keep_observations,
        count_tokens=lambda text: len(dialect.tokenizer.encode(text)),
        tool_retries=0,
    )


def tiny_decoder_config(vocab_size: int, *, conv_width: int = 4) -> DecoderConfig:
    """Two layers of width 32, with two query heads to each key head."""
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=2,
        model_dim=32,
        ff_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        conv_width=conv_width,
    )


def tiny_params(config: DecoderConfig, seed: int) -> Params:
    """Parameters in which everything matters: no convolution, norm or bias is what it begins as.

    Of the shapes of `init_params`, drawn by numpy: what JAX draws it compiles first, leaf by leaf, for many seconds.
    """
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        name, noise = jax.tree_util.keystr(path, simple=True, separator="/"), rng.normal(size=leaf.shape)
        drawn = 1 + 0.2 * noise if name.endswith("scale") else (0.8 if "conv" in name else 0.25) * noise
        return jnp.asarray(drawn, leaf.dtype)

    params: Params = jax.tree_util.tree_map_with_path(draw, shapes)
    return params
