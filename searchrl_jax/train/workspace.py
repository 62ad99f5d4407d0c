"""Everything that a run stands on and that no training changes: documents, tasks, tools, tokenizer, environment."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from searchrl_jax.config.schema import Experiment, ModelConfig
from searchrl_jax.data import collection, pydocs
from searchrl_jax.data.schema import Document, Task
from searchrl_jax.env import Limits, RewardSpec, SearchEnv
from searchrl_jax.env.observations import describe
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.hf import read_pretrained
from searchrl_jax.retrieval import Retriever, build_index
from searchrl_jax.text.dialect import Dialect, build_dialect
from searchrl_jax.text.hermes import HermesDialect, call_scaffolds
from searchrl_jax.text.tokenizer import Tokenizer, train_tokenizer
from searchrl_jax.text.tools import search_tools
from searchrl_jax.train.claims import claim

SIGNS = 64  # characters outside ASCII, the most common, that are single pieces of a tokenizer made here


@dataclass(frozen=True)
class Workspace:
    """See the module. `tasks` has the keys train, validation and test; `retrievers` the keys bm25 and vector."""

    documents: Sequence[Document]
    tasks: Mapping[str, Sequence[Task]]
    retrievers: Mapping[str, Retriever]
    dialect: Dialect
    env: SearchEnv
    model: DecoderConfig


def build_workspace(
    experiment: Experiment,
    workdir: Path,
    wrap_tool: Callable[[Retriever], Retriever] = lambda retriever: retriever,
) -> Workspace:
    """Reads or makes all parts. A tokenizer is trained on the training side and kept in `workdir`, but for a checkpoint
    that brings one.

    Args:
        wrap_tool: makes a tool of a retriever.

    Raises:
        ValueError: the user's documents or tasks are faulty, a split is empty, the checkpoint isn't known or has no
            tokenizer that fits the dialect, or a question leaves an episode no room.
    """
    data, env = experiment.data, experiment.env
    if data.corpus == "pydocs":
        documents: Sequence[Document] = pydocs.load_documents()
        tasks: Mapping[str, Sequence[Task]] = pydocs.load_tasks(documents)
    else:
        documents = collection.read_documents(data.corpus)
        tasks = collection.split_tasks(collection.read_tasks(data.tasks, documents))
    for split in ("train", "validation", "test"):
        if not tasks.get(split):
            raise ValueError(
                f"{data.tasks or data.corpus}: expected tasks of all three splits, got none for {split}; add tasks, or "
                'give rows a field "split" of train, validation or test'
            )
    _claim_data(workdir / "data.json", documents, tasks)
    retrievers = {
        # Unstemmed: in reference pages an inflected word is often a name.
        "bm25": build_index(documents, "bm25", stemmer=data.bm25_stemmer or None, lead_weight=data.bm25_lead_weight),
        "vector": build_index(documents, "vector", encoder="wordllama", index=data.vector_index),
    }
    tools = {f"{name}_search": wrap_tool(retriever) for name, retriever in retrievers.items()}
    decoder, dialect = _policy(experiment, workdir, documents, tasks, list(tools))
    limits = Limits(env.max_turns, experiment.sampling.sampling_max_tokens, env.max_tokens_per_episode)
    for task in (task for split in tasks.values() for task in split):
        length = len(dialect.render_prompt(task.query))
        if length >= limits.max_tokens_per_episode:
            raise ValueError(
                f"env.max_tokens_per_episode: expected more than the {length} tokens that the question of task "
                f"{task.task_id!r} takes, got {limits.max_tokens_per_episode}; raise it, or shorten the question"
            )
    return Workspace(
        documents=documents,
        tasks=tasks,
        retrievers=retrievers,
        dialect=dialect,
        env=SearchEnv(
            tools,
            documents,
            limits,
            RewardSpec(malformed_reward=env.malformed_reward),
            results=env.results_per_search,
            observation_words=env.observation_words,
            observation_tokens=env.observation_tokens,
            see_also=env.see_also,
            keep_observations=env.keep_observations,
            count_tokens=lambda text: len(dialect.tokenizer.encode(text)),
            tool_timeout_seconds=env.tool_timeout,
        ),
        model=decoder,
    )


def _policy(
    experiment: Experiment,
    workdir: Path,
    documents: Sequence[Document],
    tasks: Mapping[str, Sequence[Task]],
    tools: Sequence[str],
) -> tuple[DecoderConfig, Dialect]:
    """The decoder's configuration and its dialect, over its tokenizer: of the checkpoint, or of a decoder made here."""
    model = experiment.model
    if model.path:
        config, pretrained = read_pretrained(model.path)
        return config, build_dialect(model.dialect, pretrained, search_tools(tools))
    path = workdir / "tokenizer.json"
    if not path.exists():
        judged_elsewhere = {d for split in ("validation", "test") for task in tasks[split] for d in task.relevance}
        texts = [
            # Training takes the square of a word's length, and a text without spaces is one word.
            describe(document, number=1 + index % 30, words=24, see_also=experiment.env.see_also)[:4000]
            for index, document in enumerate(d for d in documents if d.doc_id not in judged_elsewhere)
        ]
        texts += [task.query for task in tasks["train"]]
        partial = path.with_suffix(".partial")
        signs = Counter(sign for document in documents for sign in document.text if not sign.isascii())
        common = [sign for sign, _ in sorted(signs.items(), key=lambda pair: (-pair[1], pair[0]))[:SIGNS]]
        train_tokenizer(texts, model.vocab_size, call_scaffolds(tools), common).save(partial)
        os.replace(partial, path)
    tokenizer = Tokenizer.load(path)
    return shape_of(model, tokenizer.vocab_size), HermesDialect(tokenizer)


def shape_of(model: ModelConfig, vocab_size: int) -> DecoderConfig:
    """The decoder of a configuration without a checkpoint, over a tokenizer of `vocab_size` entries."""
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=model.num_layers,
        model_dim=model.model_dim,
        ff_dim=model.ff_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rope_theta=model.rope_theta,
        conv_width=model.conv_width,
    )


def _claim_data(path: Path, documents: Sequence[Document], tasks: Mapping[str, Sequence[Task]]) -> None:
    """Writes digests of the data to `path`, or checks that they are those of the run that is there.

    Raises:
        ValueError: the run began with other documents or tasks, so that what it has measured is no longer comparable.
    """
    parts: dict[str, Sequence[Document] | Sequence[Task]] = {"documents": documents}
    parts |= {f"{split} tasks": found for split, found in sorted(tasks.items())}
    digests = {
        name: hashlib.sha256(json.dumps([asdict(row) for row in rows], sort_keys=True).encode()).hexdigest()
        for name, rows in parts.items()
    }
    claim(
        path,
        digests,
        lambda found: (
            f"workdir {path.parent}: its run began with other {', '.join(name for name, *_ in found)} (reference pages "
            "change with the installed packages); restore them to go on, or give another --workdir to begin anew"
        ),
    )
