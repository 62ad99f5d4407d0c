"""Checkpoints into parameters."""

from pathlib import Path

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from searchrl_jax.models.axes import PARAMETER_AXES
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.models.decoder import Params, init_params
from searchrl_jax.models.hf import hub
from searchrl_jax.models.hf.config import PretrainedConfig, pretrained_config
from searchrl_jax.models.hf.families import complete, family_of
from searchrl_jax.models.hf.folder import read_folder
from searchrl_jax.models.hf.gguf_file import read_gguf
from searchrl_jax.models.hf.place import fill
from searchrl_jax.models.hf.stored import StoredCheckpoint
from searchrl_jax.models.hf.table import Row, check, rows_of
from searchrl_jax.parallel.rules import tree_shardings


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
    family = family_of(stored.config)
    config = complete(stored.config)
    decoder = family.decoder_config(config)
    shapes = parameter_shapes(decoder)
    rows = rows_of(family.table(config), {name: each.shape for name, each in shapes.items()})
    check(stored, rows, family.carried)
    by_path: dict[str, list[Row]] = {}
    for row in rows:
        by_path.setdefault(row.path, []).append(row)
    shardings = dict.fromkeys(shapes)
    if mesh is not None:
        shardings = flatten_dict(tree_shardings(mesh, unflatten_dict(shapes, sep="/"), PARAMETER_AXES), sep="/")

    def array(path: str) -> jax.Array:
        own = by_path[path]
        shape = shapes[path].shape
        pieces = ((row.index, row.layout.ours(stored.tensors[row.name].read(), shape[len(row.index) :])) for row in own)
        return fill(shape, stored.tensors[own[0].name].dtype, pieces, shardings[path])

    # The source is named by what was asked for; a fetched one is found again in the hub's cache.
    source = str(path) if str(path).startswith(hub.PREFIX) else str(Path(path).resolve())
    return pretrained_config(decoder, source), unflatten_dict({path: array(path) for path in shapes}, sep="/")


def open_checkpoint(path: str | Path) -> StoredCheckpoint:
    """The checkpoint at a path as `load_pretrained` takes it, with quantised tensors as what they stand for."""
    if str(path).startswith(hub.PREFIX):
        path = hub.fetch(str(path))
    path = Path(path)
    stored = read_gguf(path) if path.suffix == ".gguf" else read_folder(path)
    return family_of(stored.config).opened(stored)


def parameter_shapes(config: DecoderConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a decoder's parameters by path, as the decoder itself makes them."""
    made = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    shapes: dict[str, jax.ShapeDtypeStruct] = flatten_dict(made, sep="/")
    return shapes
