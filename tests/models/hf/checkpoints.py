"""Checkpoint folders made by hand, for the tests beside this file."""

import json

import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from searchrl_jax.models.hf.outline import parameter_shapes

# A Llama of 2 layers with 4 query heads and 2 key heads of 8, model width 24, feed-forward width 40, 30 tokens.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 30,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OTHER_FILES = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "generation_config.json": '{"eos_token_id": 2}',
    "chat_template.jinja": "{{ messages }}",
}


def shapes(config):
    """Shapes of all tensors, written out once more."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    n, k, h = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    found = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (v, d)
    for layer in range(config["num_hidden_layers"]):
        own = {
            "input_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (n * h, d),
            "self_attn.k_proj.weight": (k * h, d),
            "self_attn.v_proj.weight": (k * h, d),
            "self_attn.o_proj.weight": (d, n * h),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        if config["model_type"] == "qwen2":
            own |= {f"self_attn.{x}_proj.bias": (size * h,) for x, size in (("q", n), ("k", k), ("v", k))}
        if config["model_type"] == "qwen3":
            own |= {f"self_attn.{x}_norm.weight": (h,) for x in "qk"}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return found


def random_tensors(config, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(config["dtype"])
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes(config).items()}


def write(folder, config, tensors, shards=1):
    """A checkpoint as transformers saves it, its tensors dealt out to `shards` files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, text in OTHER_FILES.items():
        (folder / name).write_text(text)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for i, name in enumerate(names):
        save_file(dict(list(tensors.items())[i::shards]), folder / name, metadata={"format": "pt"})
    weight_map = {name: names[i % shards] for i, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(folder):
    """All tensors of a checkpoint."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def random_params(config, seed=0):
    """Parameters of a decoder, which numpy makes faster than the decoder's own initialisation."""
    rng = np.random.default_rng(seed)
    arrays = {path: rng.normal(size=shape).astype(np.float32) for path, shape in parameter_shapes(config).items()}
    return unflatten_dict(arrays, sep="/")


def random_adapters(params, targets, rank, seed=0):
    """Adapters of which no matrix is 0."""
    rng = np.random.default_rng(seed)

    def pair(w):
        a = rng.normal(size=(*w.shape[:2], rank)).astype(np.float32)
        return {"a": a, "b": rng.normal(size=(w.shape[0], rank, *w.shape[2:])).astype(np.float32)}

    return {"layers": {name: pair(params["layers"][name]) for name in targets}}
