"""What each dimension of the decoder's arrays is; `parallel.rules` says where such a dimension goes."""

from collections.abc import Mapping

Logical = tuple[str | None, ...]

# By path. The leading dimension of everything in the scanned block is the layer.
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
    "layers/o": ("layers", "heads", "embed"),
    "layers/mlp_norm/scale": ("layers", None),
    "layers/gate": ("layers", "embed", "ff"),
    "layers/up": ("layers", "embed", "ff"),
    "layers/down": ("layers", "ff", "embed"),
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
    "length": (None,),
}
