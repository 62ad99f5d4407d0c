"""A run that begins with a checkpoint in Hugging Face format, and leaves one."""

import json
import shutil
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from searchrl_jax.config.overlays import with_overrides
from searchrl_jax.config.schema import Experiment, ModelConfig
from searchrl_jax.models.hf import load_pretrained, read_pretrained, save_pretrained
from searchrl_jax.testing.tiny import tiny_decoder_config, tiny_documents, tiny_params, tiny_tasks
from searchrl_jax.text.dialect import PRETRAINED
from searchrl_jax.train.loop import SetupError, run

SHAPE = ("num_layers", "model_dim", "ff_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


def write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer of the tiny documents, as a model brings it; its number of ids."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    texts = [f"{document.title}: {document.text}" for document in tiny_documents()]
    texts += [task.query for task in tiny_tasks()]
    texts += [
        '{"name": "bm25_search", "arguments": {"query": "',
        '{"name": "submit", "arguments": {"ranking": [1, 2]}}',
    ]
    backend.train_from_iterator(texts * 3, trainer)
    backend.add_special_tokens([AddedToken(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return int(backend.get_vocab_size())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    size = write_tokenizer(folder)
    config = tiny_decoder_config(size, conv_width=0)
    params = jax.tree.map(lambda x: x / 4, tiny_params(config, 0))
    save_pretrained(folder / "made", config, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder / "made" / name)
    return folder / "made"


@pytest.fixture
def of_checkpoint(settings: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    own = {name: value for name, value in settings.items() if name not in {f"model.{each}" for each in SHAPE}}
    return own | {
        "model.path": str(checkpoint),
        "model.dialect": "plain",
        "env.max_tokens_per_episode": 1024,
        "sampling.sampling_max_tokens": 64,
        "val.sampling_max_tokens": 64,
        "warmup.steps": 0,
        "warmup.copy_steps": 0,
        "schedule.max_steps": 1,
        "val.temperatures": (1.0,),
        "evaluation.temperatures": (1.0,),
        "evaluation.tasks": 2,
    }


def finished(of_checkpoint: dict[str, Any], workdir: Path, **changes: Any) -> tuple[Any, Any]:
    """Configuration and parameters that a run leaves in its `model/`."""
    summary = run(with_overrides(Experiment(exp="mine", scale="tiny", workdir=str(workdir)), of_checkpoint | changes))
    assert summary["agents"]["tuned"]["tasks"] == 2
    return load_pretrained(workdir / "model")


def test_a_model_tuned_whole_is_loaded_like_the_one_it_was(
    of_checkpoint: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    config, tuned = finished(of_checkpoint, tmp_path / "run", **{"warmup.steps": 2})
    before, first = load_pretrained(checkpoint)
    assert config == before and not (tmp_path / "run" / "adapters").exists()
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), tuned, first)
    assert min(jax.tree.leaves(moved)) > 0
    tokenizers = [read_pretrained(path)[1] for path in (tmp_path / "run" / "model", checkpoint)]
    assert len({tokenizer.decode(range(tokenizer.vocab_size)) for tokenizer in tokenizers}) == 1


def test_adapters_added_to_the_checkpoint_are_the_tuned_model(
    of_checkpoint: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    # A penalty on entropy moves a policy also where all rollouts fail alike, as those of random weights do.
    changes = {
        "lora.lora_rank": 2,
        "lora.lora_alpha": 6.0,
        "rl.advantage_method": "reinforce_pp",
        "rl.entropy_coef": -1.0,
    }
    _, tuned = finished(of_checkpoint, tmp_path / "run", **changes)
    _, first = load_pretrained(checkpoint)
    adapters = load_file(tmp_path / "run" / "adapters" / "adapter_model.safetensors")
    for layer in range(2):
        stem = f"base_model.model.model.layers.{layer}.mlp.up_proj"
        a, b = (adapters[f"{stem}.lora_{which}.weight"] for which in "AB")
        added = 3.0 * (b @ a).T
        assert np.abs(added).max() > 0
        np.testing.assert_allclose(tuned["layers"]["up"][layer] - first["layers"]["up"][layer], added, atol=1e-6)
    np.testing.assert_array_equal(tuned["embedding"], first["embedding"])


def test_other_weights_in_the_place_of_the_base_are_refused(
    of_checkpoint: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(checkpoint, tmp_path / "own"))
    changes = {"model.path": str(own), "lora.lora_rank": 2, "schedule.max_steps": 0}
    finished(of_checkpoint, tmp_path / "run", **changes)
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match="its weights are not those that this run began with; put them back"):
        finished(of_checkpoint, tmp_path / "run", **changes)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.nan, "expected finite weights, got others in final_norm/scale; fetch it anew"),
        (3e38, r"warm-up: expected a finite loss, got \w+ at update 1; lower warmup.learning_rate"),
    ],
)
def test_numbers_that_are_not_finite_end_a_run(
    of_checkpoint: dict[str, Any], checkpoint: Path, tmp_path: Path, scale: float, message: str
) -> None:
    own = Path(shutil.copytree(checkpoint, tmp_path / "own"))
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"][:] = scale
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=message):
        finished(of_checkpoint, tmp_path / "run", **{"model.path": str(own), "warmup.steps": 2})
    assert not (tmp_path / "run" / "base.json").exists()


def test_a_narrow_base_gets_wide_adapters(of_checkpoint: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    changes = {"model.dtype": "bfloat16", "lora.lora_rank": 2, "rl.advantage_method": "gae", "rl.entropy_coef": -1.0}
    _, tuned = finished(of_checkpoint, tmp_path / "run", **changes)
    _, first = load_pretrained(checkpoint)
    adapted = ("q", "k", "v", "o", "gate", "up", "down")
    for name, x in flatten_dict(tuned, sep="/").items():
        assert x.dtype == jnp.bfloat16
        if name.removeprefix("layers/") not in adapted:
            np.testing.assert_array_equal(x, flatten_dict(first, sep="/")[name].astype(jnp.bfloat16), err_msg=name)
    adapters = load_file(tmp_path / "run" / "adapters" / "adapter_model.safetensors")
    assert all(x.dtype == np.float32 for x in adapters.values())
    with pytest.raises(ValueError, match="expected float32 where the base itself is trained"):
        finished(of_checkpoint, tmp_path / "other", **{"model.dtype": "bfloat16"})


@pytest.mark.parametrize(
    "broken, message",
    [
        ("tokenizer.json", "expected a tokenizer.json beside the weights"),
        ("config.json", "expected a folder with a config.json"),
    ],
)
def test_a_checkpoint_that_lacks_a_file_is_refused_in_one_line(
    broken: str, message: str, of_checkpoint: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in checkpoint.iterdir():
        if path.name != broken:
            (other / path.name).write_bytes(path.read_bytes())
    changed = of_checkpoint | {"model.path": str(other)}
    with pytest.raises(SetupError, match=message):
        run(with_overrides(Experiment(exp="mine", scale="tiny", workdir=str(tmp_path / "run")), changed))


def test_tensors_that_are_missing_are_listed_without_a_traceback(
    of_checkpoint: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    experiment = Experiment(exp="mine", scale="tiny", workdir=str(tmp_path / "run"))
    with pytest.raises(SetupError, match="model.layers.1.mlp.up_proj.weight"):
        run(with_overrides(experiment, of_checkpoint | {"model.path": str(other)}))


def test_the_dialects_that_can_be_set_are_those_that_there_are() -> None:
    names = typing.get_args(typing.get_type_hints(ModelConfig)["dialect"])
    assert set(names) == {"hermes", *PRETRAINED}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.path": "x"}, "model.dialect: expected the dialect of its family"),
        ({"model.dialect": "qwen3"}, "model.dialect: expected hermes"),
        ({"model.path": "x", "model.dialect": "plain", "model.num_layers": 2}, "model.num_layers: expected 4"),
    ],
)
def test_settings_that_a_checkpoint_leaves_unread_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_overrides(Experiment(exp="mine", scale="tiny"), changes)
