"""The decoder: one scanned block, used for training rows, for appending to a cache and for decoding."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from searchrl_jax.models.cache import Cache, Entries, Stage
from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.ops.attention import KeyBlock, attend, attend_causally
from searchrl_jax.ops.convolution import causal_convolution, convolution_state
from searchrl_jax.ops.linear import project
from searchrl_jax.ops.norm import rms_norm
from searchrl_jax.ops.rope import rotary_tables, rotate

Params = dict[str, Any]


@struct.dataclass
class Past:
    """What one layer (or, with a leading axis, every layer) remembers: blocks of keys and values, past inputs."""

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    conv: Float[Array, "B W-1 D"]


@struct.dataclass
class Shared:
    """What all layers see alike. Rows are packed (`segment_ids`, no past), or there is a mask per block of keys."""

    masks: tuple[Bool[Array, "#B #T S"], ...]
    cosine: Float[Array, "B T half"]
    sine: Float[Array, "B T half"]
    segment_ids: Int[Array, "B T"] | None


class RMSNorm(nn.Module):
    """`ops.norm.rms_norm` with a learned scale."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.param("scale", nn.initializers.ones, (x.shape[-1],)), epsilon=self.epsilon)


class Block(nn.Module):
    """One layer. Takes what it may attend to, returns the stream and its own keys, values and convolution inputs."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        past: Past,
        shared: Shared,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        cfg = self.config
        h = RMSNorm(cfg.norm_epsilon, name="attention_norm")(x)
        conv_input = seeking = sought = h
        if cfg.conv_width:
            # A query that knows the last tokens and a key that knows the tokens before it: "what followed the last time
            # that I stood after these?" is then one layer's work.
            seeking = causal_convolution(h, self._kernel("conv_q", shift=0), past.conv, shared.segment_ids)
            sought = causal_convolution(h, self._kernel("conv_k", shift=1), past.conv, shared.segment_ids)

        dense = nn.initializers.normal(cfg.model_dim**-0.5)
        w_q = self.param("q", dense, (cfg.model_dim, cfg.num_heads, cfg.head_dim))
        w_k = self.param("k", dense, (cfg.model_dim, cfg.num_kv_heads, cfg.head_dim))
        w_v = self.param("v", dense, (cfg.model_dim, cfg.num_kv_heads, cfg.head_dim))
        out_scale = (2 * cfg.num_layers) ** -0.5
        w_o = self.param(
            "o",
            nn.initializers.normal(out_scale * (cfg.num_heads * cfg.head_dim) ** -0.5),
            (cfg.num_heads * cfg.head_dim, cfg.model_dim),
        )
        q, k, v = (self._adapted(*each) for each in (("q", seeking, w_q), ("k", sought, w_k), ("v", h, w_v)))
        if cfg.has_qkv_bias:
            q, k, v = (self._with_bias(*each) for each in (("q_bias", q), ("k_bias", k), ("v_bias", v)))
        if cfg.has_qk_norm:
            q, k = RMSNorm(cfg.norm_epsilon, name="q_norm")(q), RMSNorm(cfg.norm_epsilon, name="k_norm")(k)
        q, k = rotate(q, shared.cosine, shared.sine), rotate(k, shared.cosine, shared.sine)
        k_BKTH = k.transpose(0, 2, 1, 3)
        v_BKTH = v.transpose(0, 2, 1, 3)
        if shared.segment_ids is None:
            keys, values = (*past.k, k_BKTH), (*past.v, v_BKTH)
            mixed = attend(q, [KeyBlock(*block) for block in zip(keys, values, shared.masks, strict=True)])
        else:
            mixed = attend_causally(q, k_BKTH, v_BKTH, shared.segment_ids)
        x = x + self._adapted("o", mixed.reshape(*x.shape[:2], -1), w_o)

        h = RMSNorm(cfg.norm_epsilon, name="mlp_norm")(x)
        gate = self._adapted("gate", h, self.param("gate", dense, (cfg.model_dim, cfg.ff_dim)))
        up = self._adapted("up", h, self.param("up", dense, (cfg.model_dim, cfg.ff_dim)))
        w_down = self.param("down", nn.initializers.normal(out_scale * cfg.ff_dim**-0.5), (cfg.ff_dim, cfg.model_dim))
        x = x + self._adapted("down", jax.nn.silu(gate) * up, w_down)
        return x, {"k": k_BKTH, "v": v_BKTH, "conv_input": conv_input}

    def _adapted(self, name: str, x: Float[Array, "... D"], w: Float[Array, "D ..."]) -> Float[Array, "..."]:
        """x W, with (x A) B added where the parameters have adapters of this name (`models.lora`)."""
        y = project(x, w)
        if not self.has_variable("lora", name):
            return y
        pair: dict[str, Array] = self.get_variable("lora", name)
        return y + project(project(x, pair["a"]), pair["b"])

    def _with_bias(self, name: str, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        return x + self.param(name, nn.initializers.zeros, x.shape[2:]).astype(x.dtype)

    def _kernel(self, name: str, *, shift: int) -> Float[Array, "W D"]:
        """Taps that begin as +-r^j, j tokens back from `shift` on, with noise; r is 0.7 and 0.95 in turn over channels.

        So of several places that the last tokens occurred at, the one with the longest common past scores highest: the
        channels that forget fast find a place after few tokens, the others tell it from places that begin alike, where
        copying would otherwise run in circles. Queries and keys share the signs, so that a token met at another
        distance than in the query adds noise and no score.
        """
        width, dim = self.config.conv_width, self.config.model_dim

        def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
            signs = jax.random.rademacher(jax.random.key(0), (width, dim), dtype).at[0].set(1.0)
            rates = jnp.where(jnp.arange(dim) % 2 == 0, 0.7, 0.95)
            taps = signs * rates ** jnp.arange(width, dtype=dtype)[:, None]
            taps = jnp.concatenate([jnp.full((shift, dim), 0.25, dtype), taps])[:width]
            return taps + jax.random.uniform(key, shape, dtype, -0.2, 0.2)

        return self.param(name, init, (width, dim))


class Decoder(nn.Module):
    """Token embedding, the scanned blocks and the final norm. `unembed` gives logits, with the embedding if it is tied.

    With `remat`, a block's activations are computed again in the backward pass in place of being kept.
    """

    config: DecoderConfig
    remat: bool = False

    def setup(self) -> None:
        cfg = self.config
        self.embedding = self.param(
            "embedding", nn.initializers.normal(cfg.model_dim**-0.5), (cfg.vocab_size, cfg.model_dim)
        )
        self.unembedding = self.embedding
        if not cfg.has_tied_embedding:
            shape = (cfg.vocab_size, cfg.model_dim)
            self.unembedding = self.param("unembedding", nn.initializers.normal(cfg.model_dim**-0.5), shape)
        self.layers = nn.scan(
            nn.remat(Block) if self.remat else Block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            out_axes=0,
            length=cfg.num_layers,
            # A small decoder is faster unrolled (no copy of a layer's cache); a deep one compiles in constant time.
            unroll=cfg.num_layers if cfg.num_layers <= 8 else 1,
        )(cfg)
        self.final_norm = RMSNorm(cfg.norm_epsilon)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        past: Past,
        masks: tuple[Bool[Array, "#B #T S"], ...],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        cosine, sine = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = jnp.take(self.embedding, tokens, axis=0)
        x, new = self.layers(x, past, Shared(masks, cosine, sine, segment_ids))
        return self.final_norm(x), new

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return jnp.einsum(
            "...D,VD->...V", hidden, self.unembedding.astype(hidden.dtype), preferred_element_type=jnp.float32
        )


def _variables(params: Params) -> dict[str, Params]:
    """Parameters as Linen's collections: `models.lora.attach` puts the adapters under "lora"."""
    if "lora" not in params:
        return {"params": params}
    return {"params": {name: part for name, part in params.items() if name != "lora"}, "lora": params["lora"]}


def _no_past(config: DecoderConfig, rows: int) -> Past:
    return Past((), (), jnp.zeros((config.num_layers, rows, max(config.conv_width - 1, 0), config.model_dim)))


def init_params(config: DecoderConfig, key: Array) -> Params:
    """Fresh parameters, float32, as a plain nested dict.

    Attention begins as a look-up: queries resemble the keys of their group (a token scores high with its like), and
    what a head writes resembles what it read.

        w_q <- (w_q + w_k) / sqrt(2)        w_o <- (w_o + w_v^T / sqrt(2 layers)) / sqrt(2)

    Source:
        Trockman and Kolter 2023, arXiv:2305.09828, whose W_q W_k^T and W_v W_o begin near multiples of the identity.
    """
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Decoder(config).init(key, tokens, tokens, _no_past(config, 1), (), tokens)["params"]
    layers = params["layers"]
    group = config.num_heads // config.num_kv_heads
    q = (layers["q"] + jnp.repeat(layers["k"], group, axis=2)) / 2**0.5
    read = jnp.repeat(layers["v"], group, axis=2).reshape(config.num_layers, config.model_dim, -1).swapaxes(1, 2)
    o = (layers["o"] + read * (2 * config.num_layers) ** -0.5) / 2**0.5
    return params | {"layers": layers | {"q": q, "o": o}}


def forward(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    *,
    remat: bool = False,
) -> Float[Array, "B L D"]:
    """Hidden states of training rows; several trajectories may share a row, told apart by `segment_ids`.

    Args:
        positions: each token's place in its own trajectory, from 0.
        segment_ids: the trajectory of each token; padding has an id of its own (0).
        remat: compute a block's activations again in the backward pass in place of keeping them.
    """
    past = _no_past(config, tokens.shape[0])
    hidden, _ = Decoder(config, remat).apply(_variables(params), tokens, positions, past, (), segment_ids)
    return hidden


def unembed(config: DecoderConfig, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Logits (float32) of hidden states, with the tied embedding or the one of its own."""
    logits: Any = Decoder(config).apply(_variables(params), hidden, method="unembed")
    return logits


def append(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B T"],
    num_new: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Entries]:
    """Hidden states of `tokens[b, :num_new[b]]` after row b's cached tokens, and what they add to the cache.

    Args:
        cache: read whole, so pass the bucket that holds the longest row (`cache.rows_of`).
        num_new: tokens to append per row; the rest of the row is padding.
    """
    T, S = tokens.shape[1], cache.k.shape[3]
    positions = cache.length[:, None] + jnp.arange(T)
    cached = (jnp.arange(S)[None, :] < cache.length[:, None])[:, None, :]
    new_causal = (jnp.arange(T)[:, None] >= jnp.arange(T)[None, :])[None]
    past = Past((cache.k,), (cache.v,), cache.conv)
    hidden, new = Decoder(config).apply(_variables(params), tokens, positions, past, (cached, new_causal))
    conv = jax.vmap(convolution_state, in_axes=(0, 0, None))(new["conv_input"], cache.conv, num_new)
    return hidden, Entries(k=new["k"], v=new["v"], conv=conv)


def decode_step(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    stage: Stage,
    step: Int[Array, ""],
    tokens: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], Stage]:
    """Logits after one more token in each row, and the stage that holds it.

    A chunk of C steps leaves the cache alone: it writes to a *stage* of C entries, at index `step` in every row, so
    that a step moves little memory. `staged_entries` then says what each row really fed.
    """
    positions = (cache.length + step)[:, None]
    cached = (jnp.arange(cache.k.shape[3])[None, :] < cache.length[:, None])[:, None, :]
    staged = (jnp.arange(stage.k.shape[3]) < step)[None, None, :]
    itself = jnp.ones((1, 1, 1), bool)
    past = Past(
        (cache.k, stage.k),
        (cache.v, stage.v),
        jax.lax.dynamic_slice_in_dim(stage.conv, step, cache.conv.shape[2], axis=2),
    )
    model = Decoder(config)
    hidden, new = model.apply(_variables(params), tokens[:, None], positions, past, (cached, staged, itself))
    logits: Any = model.apply(_variables(params), hidden[:, 0], method="unembed")
    put = jax.lax.dynamic_update_slice_in_dim
    return logits, Stage(
        k=put(stage.k, new["k"].astype(stage.k.dtype), step, axis=3),
        v=put(stage.v, new["v"].astype(stage.v.dtype), step, axis=3),
        conv=put(stage.conv, new["conv_input"].astype(stage.conv.dtype), cache.conv.shape[2] + step, axis=2),
    )
