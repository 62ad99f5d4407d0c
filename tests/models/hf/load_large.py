"""Run by `test_large.py` in a process of its own: loads a small Qwen3.6-27B, prints what that took as JSON.

python tests/models/hf/load_large.py WIDTH VOCABULARY [save]
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from searchrl_jax.models.hf import load_pretrained, save_pretrained

KINDS = (["linear_attention"] * 3 + ["full_attention"]) * 16


def configuration(width, vocabulary):
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": vocabulary,
            "num_hidden_layers": 64,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_conv_kernel_dim": 4,
            "layer_types": KINDS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 27},
    }


def shapes(width, vocabulary):
    """What is read, and what is carried."""
    feed, top = 3 * width, "model.language_model."
    read = {f"{top}embed_tokens.weight": (vocabulary, width), f"{top}norm.weight": (width,)}
    read["lm_head.weight"] = (vocabulary, width)
    for i, kind in enumerate(KINDS):
        own = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (feed, width),
            "mlp.up_proj.weight": (feed, width),
            "mlp.down_proj.weight": (width, feed),
        }
        if kind == "full_attention":
            own |= {
                "self_attn.q_proj.weight": (96, width),
                "self_attn.k_proj.weight": (8, width),
                "self_attn.v_proj.weight": (8, width),
                "self_attn.q_norm.weight": (8,),
                "self_attn.k_norm.weight": (8,),
                "self_attn.o_proj.weight": (width, 48),
            }
        else:
            own |= {
                "linear_attn.in_proj_qkv.weight": (80, width),
                "linear_attn.in_proj_z.weight": (48, width),
                "linear_attn.in_proj_b.weight": (12, width),
                "linear_attn.in_proj_a.weight": (12, width),
                "linear_attn.conv1d.weight": (80, 1, 4),
                "linear_attn.dt_bias": (12,),
                "linear_attn.A_log": (12,),
                "linear_attn.norm.weight": (4,),
                "linear_attn.out_proj.weight": (width, 48),
            }
        read |= {f"{top}layers.{i}.{name}": shape for name, shape in own.items()}
    carried = {f"model.visual.blocks.{i}.part{j}": (2, 3) for i in range(27) for j in range(12)}
    carried |= {f"model.visual.part{j}": (5,) for j in range(9)} | {f"mtp.part{j}": (4, 2) for j in range(15)}
    return read, carried


def status(name):
    """A line of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def main(width, vocabulary):
    read, carried = shapes(width, vocabulary)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(configuration(width, vocabulary)))
        wide = ("A_log", "linear_attn.norm.weight")
        drawn = {
            each: rng.normal(0, 0.1, shape).astype("float32" if each.endswith(wide) else jax.numpy.bfloat16)
            for each, shape in (read | carried).items()
        }
        largest = max(math.prod(shape) * drawn[each].itemsize for each, shape in read.items())
        save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
        del drawn
        load_pretrained(folder)  # compiles; what a first call takes is not the checkpoint's
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        config, params = load_pretrained(folder)
        peak = status("VmHWM") - before
        found = {
            "tensors": len(read),
            "carried": len(carried),
            "layers": config.num_layers,
            "parameters": sum(x.nbytes for x in jax.tree.leaves(params)),
            "largest": largest,
            "peak": peak,
        }
        save_pretrained(Path(name, "saved"), config, params)
        was, now = load_file(folder / "model.safetensors"), load_file(Path(name, "saved", "model.safetensors"))
        same = (was[each].dtype == now[each].dtype and was[each].tobytes() == now[each].tobytes() for each in was)
        found["is_the_same"] = was.keys() == now.keys() and all(same)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
