"""A run that is over in seconds, of somebody's own documents and tasks; and quick compilation."""

import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from searchrl_jax.testing.tiny import tiny_documents, tiny_tasks

# Compiling is nearly all that so small models do. Nothing is fused either, so that adding 0 changes no bit.
jax.config.update("jax_disable_most_optimizations", True)

LAUNCH = Path(__file__).resolve().parents[1] / "launch" / "tpu.py"

SETTINGS: dict[str, Any] = {
    "data.vector_index": "exact",
    "batch.global_batch_size": 2,
    "batch.group_size": 4,
    "batch.micro_batch_rows": 2,
    "rl.minibatches": 2,
    "sampling.sampling_max_tokens": 24,
    "rollout.rollout_max_concurrency": 4,
    "rollout.decode_chunk": 8,
    "rollout.max_steps_off_policy": 0,
    "env.max_turns": 3,
    "env.max_tokens_per_episode": 192,
    "env.results_per_search": 2,
    "env.observation_tokens": 48,
    "env.see_also": 2,
    "model.num_layers": 2,
    "model.model_dim": 32,
    "model.ff_dim": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_dim": 16,
    "model.vocab_size": 320,
    "warmup.steps": 70,
    "warmup.copy_steps": 10,
    "warmup.scrambled": 0.1,
    "warmup.slips": 0.1,
    "warmup.learning_rate": 2e-2,
    "warmup.lazy": 0.8,
    "warmup.rambling": 0.0,
    "warmup.overlong": 0.1,
    "optimizer.learning_rate": 1e-3,
    "schedule.max_steps": 2,
    "schedule.max_epochs": 2,
    "schedule.val_every": 2,
    "schedule.save_every": 1,
    "val.temperatures": (1.0, 0.0),
    "val.val_batch_size": 4,
    "val.val_group_size": 2,
    "val.sampling_max_tokens": 20,
    "evaluation.temperatures": (1.0, 0.5, 0.0),
    "evaluation.tasks": 4,
    "evaluation.bootstrap_samples": 200,
}


def pytest_configure(config: pytest.Config) -> None:
    # What one test has compiled, the next ones of the same process need not compile. The folder goes with the process:
    # each `make test` compiles all of it once.
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    jax.config.update("jax_compilation_cache_dir", folder.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="how often test_kills.py kills a run of each kind")


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Overrides for an experiment over documents and tasks that lie in `tmp_path`."""
    documents, tasks = tmp_path / "docs.jsonl", tmp_path / "tasks.jsonl"
    with documents.open("w") as file:
        for document in tiny_documents():
            row = {"doc_id": document.doc_id, "text": document.text, "title": document.title, **document.metadata}
            file.write(json.dumps(row) + "\n")
    splits = ("train", "train", "train", "validation", "test", "test")
    with tasks.open("w") as file:
        for index, task in enumerate(tiny_tasks()):
            row = {"task_id": task.task_id, "query": task.query, "relevance": task.relevance, **task.metadata}
            file.write(json.dumps(row | {"split": splits[index // 2 % 6]}) + "\n")
    yield {"data.corpus": str(documents), "data.tasks": str(tasks), **SETTINGS}


@pytest.fixture
def options() -> Callable[[Mapping[str, Any]], list[str]]:
    """The command line that gives settings to launch/tpu.py."""

    def write(settings: Mapping[str, Any]) -> list[str]:
        words = {name: value if isinstance(value, tuple) else (value,) for name, value in settings.items()}
        named = [f"--{name}={','.join(map(str, value))}" for name, value in words.items()]
        return ["--exp=mtrl_search", "--scale=local", *named]

    return write


@pytest.fixture
def launch() -> Callable[[list[str]], int]:
    """`main` of launch/tpu.py."""
    spec = importlib.util.spec_from_file_location("launch_tpu", LAUNCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[list[str]], int] = module.main
    return main
