"""What each dimension of the decoder's arrays is; `parallel.rules` says where such a dimension goes."""

from collections.abc import Mapping

Logical = tuple[str | None, ...]

# By path, without a layer's place in its period. The leading dimension of everything in the scanned period counts
# periods.
PARAMETER_AXES: Mapping[str, Logical] = {
    "embedding": ("vocab", "embed"),
    "unembedding": ("vocab", "embed"),
    "final_norm/scale": (None,),
    "layers/attention_norm/scale": ("layers", None),
    "layers/conv_q": ("layers", None, "embed"),
    "layers/conv_k": ("layers", None, "embed"),
    "layers/q": ("layers", "embed", "heads", None),
    "layers/k": ("layers", "embed", "kv_heads", None),
    "layers/v": ("layers", "embed", "kv_heads", None),
    "layers/q_bias": ("layers", "heads", None),
    "layers/k_bias": ("layers", "kv_heads", None),
    "layers/v_bias": ("layers", "kv_heads", None),
    "layers/q_norm/scale": ("layers", None),
    "layers/k_norm/scale": ("layers", None),
    "layers/sink": ("layers", "heads"),
    "layers/output_gate": ("layers", "embed", "heads", None),
    "layers/o": ("layers", "heads", "embed"),
    "layers/o_bias": ("layers", None),
    "layers/delta_conv": ("layers", None, None),
    "layers/beta": ("layers", "embed", "heads"),
    "layers/decay": ("layers", "embed", "heads"),
    "layers/decay_bias": ("layers", "heads"),
    "layers/log_rate": ("layers", "heads"),
    "layers/output_norm/scale": ("layers", None),
    "layers/attention_post_norm/scale": ("layers", None),
    "layers/mlp_norm/scale": ("layers", None),
    "layers/gate": ("layers", "embed", "ff"),
    "layers/up": ("layers", "embed", "ff"),
    "layers/down": ("layers", "ff", "embed"),
    "layers/router": ("layers", "embed", None),
    "layers/router_bias": ("layers", None),
    "layers/expert_gate": ("layers", "experts", "embed", "ff"),
    "layers/expert_up": ("layers", "experts", "embed", "ff"),
    "layers/expert_down": ("layers", "experts", "ff", "embed"),
    "layers/expert_gate_bias": ("layers", "experts", "ff"),
    "layers/expert_up_bias": ("layers", "experts", "ff"),
    "layers/expert_down_bias": ("layers", "experts", None),
    "layers/mlp_post_norm/scale": ("layers", None),
    "layers/layer_scale": ("layers",),
}

# The matrices of a block that may have low-rank adapters: by name, A from what W takes in, B to what it gives out.
ADAPTED = ("q", "k", "v", "o", "gate", "up", "down")
ADAPTER_AXES: Mapping[str, Logical] = {
    f"layers/{name}/{part}": axes
    for name in ADAPTED
    for layers, inside, *outside in [PARAMETER_AXES[f"layers/{name}"]]
    for part, axes in (("a", (layers, inside, None)), ("b", (layers, None, *outside)))
}

VALUE_HEAD_AXES: Mapping[str, Logical] = {"value/kernel": ("embed", None), "value/bias": (None,)}

# The model width of the convolution's inputs is an activation's, which no device splits.
CACHE_AXES: Mapping[str, Logical] = {
    "k": ("layers", "rows", "kv_heads", None, None),
    "v": ("layers", "rows", "kv_heads", None, None),
    "conv": ("layers", "rows", None, None),
    "state": ("layers", "rows", "heads", None, None),
    "length": ("rows",),
}
