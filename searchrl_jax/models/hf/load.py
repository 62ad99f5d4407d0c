"""Checkpoints into parameters."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from searchrl_jax.models.axes import PARAMETER_AXES
from searchrl_jax.models.decoder import Params
from searchrl_jax.models.hf import hub
from searchrl_jax.models.hf.config import PretrainedConfig, pretrained_config
from searchrl_jax.models.hf.families import family_of
from searchrl_jax.models.hf.folder import read_folder
from searchrl_jax.models.hf.gguf_file import read_gguf
from searchrl_jax.models.hf.outline import outline
from searchrl_jax.models.hf.place import fill
from searchrl_jax.models.hf.require import require
from searchrl_jax.models.hf.stored import StoredCheckpoint
from searchrl_jax.models.hf.table import Row, check
from searchrl_jax.parallel.rules import tree_shardings
from searchrl_jax.text.pretrained import TOKENIZER, TOKENIZER_CONFIG, PretrainedTokenizer, end_token


def load_pretrained(path: str | Path, mesh: Mesh | None = None) -> tuple[PretrainedConfig, Params]:
    """Configuration and parameters of a checkpoint, in the dtypes that it has.

    Tensors go one by one onto the devices that they belong to: beside the parameters' own share, the host holds one
    tensor at a time.

    Args:
        path: a folder that holds config.json and safetensors, a .gguf file, or hf://owner/name.
        mesh: where the parameters go, by `parallel.rules`; the default device where None.

    Raises:
        ValueError: there is no such checkpoint; its family, or something that its configuration asks for, isn't known
            here; or tensors are missing, extra, misshaped or mistyped, all of which the message lists.
    """
    stored = open_checkpoint(path)
    model = outline(stored.config)
    check(stored, model.rows, model.carried)
    by_path: dict[str, list[Row]] = {}
    for row in model.rows:
        for name in row.paths:
            by_path.setdefault(name, []).append(row)

    def dtype(name: str) -> np.dtype:
        first = by_path[name][0]
        return stored.tensors[first.name].dtype if first.layout.is_exact else np.dtype("float32")

    def piece(row: Row, name: str) -> np.ndarray:
        shapes = [model.shapes[each][len(row.index) :] for each in row.paths]
        return row.layout.ours(stored.tensors[row.name].read(), *shapes)[row.paths.index(name)]

    made = {name: jax.ShapeDtypeStruct(shape, dtype(name)) for name, shape in model.shapes.items()}
    shardings: dict[str, Any] = dict.fromkeys(made)
    if mesh is not None:
        shardings = flatten_dict(tree_shardings(mesh, unflatten_dict(made, sep="/"), PARAMETER_AXES), sep="/")
    arrays = {
        name: fill(each.shape, each.dtype, ((row.index, piece(row, name)) for row in by_path[name]), shardings[name])
        for name, each in made.items()
    }
    return pretrained_config(model.decoder, _source(path)), unflatten_dict(arrays, sep="/")


def read_pretrained(path: str | Path) -> tuple[PretrainedConfig, PretrainedTokenizer]:
    """Configuration and tokenizer of a checkpoint, as `load_pretrained` takes it, without its weights.

    Raises:
        ValueError: there is no such checkpoint, it isn't known here, or it has no tokenizer that fits it.
    """
    stored = open_checkpoint(path)
    config = pretrained_config(outline(stored.config).decoder, _source(path))
    if TOKENIZER not in stored.files:
        raise ValueError(f"{stored.where}: expected a {TOKENIZER} beside the weights, found none; save the model whole")
    try:
        settings = json.loads(stored.files[TOKENIZER_CONFIG]()) if TOKENIZER_CONFIG in stored.files else {}
        end = end_token(settings)
    except ValueError as error:
        raise ValueError(f"{stored.where}/{TOKENIZER_CONFIG}: {error}; fetch it anew") from error
    tokenizer = PretrainedTokenizer(stored.files[TOKENIZER]().decode("utf-8"), end)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{stored.where}: expected a tokenizer of at most {config.vocab_size} ids, as many as the model has, got "
            f"{tokenizer.vocab_size}; give the model its own tokenizer"
        )
    return config, tokenizer


def _source(path: str | Path) -> str:
    """What was asked for: a fetched checkpoint is found again in the hub's cache."""
    return str(path) if str(path).startswith(hub.PREFIX) else str(Path(path).resolve())


def open_checkpoint(path: str | Path) -> StoredCheckpoint:
    """The checkpoint at a path as `load_pretrained` takes it, with quantised tensors as what they stand for."""
    if str(path).startswith(hub.PREFIX):
        path = hub.fetch(str(path))
    path = Path(path)
    stored = read_gguf(path) if path.suffix == ".gguf" else read_folder(path)
    opened = family_of(stored.config).opened(stored)
    require(opened.config, quantization_config=None)
    return opened
