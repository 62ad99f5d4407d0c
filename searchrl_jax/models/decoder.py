"""The decoder: one scanned period of layers, used for training rows, for appending to a cache and for decoding.

Parameters, with a leading axis over periods on all of "layers"; scales of norms are what they multiply by:

    embedding [V, D]        unembedding [V, D], where untied        final_norm/scale [D]
    layers/ (a pattern of one layer) or layers/0/, layers/1/, ... (by place in a longer pattern):
        attention_norm/scale [D]        o [N * H, D]        mlp_norm/scale [D]
        attention:      q [D, N, H]     k, v [D, K, H] (no v with reads_keys)
                        q_norm/scale, k_norm/scale [H]      q_bias [N, H]       k_bias, v_bias [K, H]
                        output_gate [D, N, H]       sink [N]        o_bias [D]
                        conv_q, conv_k [W, D], tap j for the token j back
        delta:          q, k [D, key heads, H]      v, output_gate [D, value heads, J]      delta_conv [W, channels]
                        beta, decay [D, value heads]    log_rate, decay_bias [value heads]  output_norm/scale [J]
                        (channels are q's, k's and v's, each by head; tap j for the token j back)
        feed-forward:   gate, up [D, F]     down [F, D]
        experts:        router [D, E]       expert_gate, expert_up [E, D, F]    expert_down [E, F, D]
                        with a limit: router_bias [E], expert_{gate,up}_bias [E, F], expert_down_bias [E, D]
        Gemma:          attention_post_norm/scale, mlp_post_norm/scale [D]      layer_scale []
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from searchrl_jax.models.block import STREAM, Block, Past, RMSNorm, Shared
from searchrl_jax.models.cache import Cache, Entries, Stage, cached_positions, empty_states
from searchrl_jax.models.config import DecoderConfig, Layer
from searchrl_jax.ops.convolution import convolution_state
from searchrl_jax.ops.rope import rotary_tables
from searchrl_jax.parallel.rules import spread

Params = dict[str, Any]
New = tuple[dict[str, Array], ...]


class Period(nn.Module):
    """The layers of a pattern, one after the other.

    With `remat` each by itself, so that the backward pass holds the activations of one layer at a time.
    """

    config: DecoderConfig
    mesh: Mesh | None = None
    remat: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], pasts: tuple[Past, ...], shared: Shared) -> tuple[Array, New]:
        added = []
        block: Any = nn.remat(Block) if self.remat else Block
        for place, past in enumerate(pasts):
            x, new = block(self.config, place, self.mesh, name=str(place))(x, past, shared)
            added.append(new)
        return x, tuple(added)


class Decoder(nn.Module):
    """Token embedding, the scanned blocks and the final norm. `unembed` gives logits, with the embedding if it is tied.

    With `remat`, a block's activations are computed again in the backward pass in place of being kept. With `mesh`,
    rows and their tokens are spread over it.
    """

    config: DecoderConfig
    remat: bool = False
    mesh: Mesh | None = None

    def setup(self) -> None:
        cfg = self.config
        self.embedding = self.param(
            "embedding", nn.initializers.normal(cfg.model_dim**-0.5), (cfg.vocab_size, cfg.model_dim)
        )
        self.unembedding = self.embedding
        if not cfg.has_tied_embedding:
            shape = (cfg.vocab_size, cfg.model_dim)
            self.unembedding = self.param("unembedding", nn.initializers.normal(cfg.model_dim**-0.5), shape)
        # A pattern of one layer has no level of its own in the parameters.
        body: Any = Period
        if len(cfg.pattern) == 1:
            body = nn.remat(Block) if self.remat else Block
        self.layers = nn.scan(
            body,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            out_axes=0,
            length=cfg.num_periods,
            unroll=cfg.num_periods if cfg.is_unrolled else 1,
        )(cfg, mesh=self.mesh, **({"remat": self.remat} if body is Period else {}))
        self.final_norm = RMSNorm(cfg.norm_epsilon)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        pasts: tuple[Past, ...],
        masks: tuple[tuple[Bool[Array, "#B #T S"], ...], ...] = (),
        key_positions: tuple[tuple[Int[Array, "#B S"], ...], ...] = (),
        is_real: Bool[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], New]:
        cfg = self.config
        tables = tuple(
            rotary_tables(
                positions, cfg.rotary_dim or layer.head_dim, layer.rope_theta, turning=layer.turning, yarn=cfg.yarn
            )
            for layer in cfg.period
        )
        x = spread(jnp.take(self.embedding, tokens, axis=0), self.mesh, STREAM)
        if cfg.is_gemma:
            x = x * jnp.asarray(cfg.model_dim**0.5, x.dtype)
        shared = Shared(masks, key_positions, positions, is_real, tables, segment_ids)
        if len(pasts) == 1:
            x, new = self.layers(x, pasts[0], shared)
            added = (new,)
        else:
            x, added = self.layers(x, pasts, shared)
        return self.final_norm(x), added

    def unembed(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        logits = jnp.einsum(
            "...D,VD->...V", hidden, self.unembedding.astype(hidden.dtype), preferred_element_type=jnp.float32
        )
        cap = self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _variables(params: Params) -> dict[str, Params]:
    """Parameters as Linen's collections: `models.lora.attach` puts the adapters under "lora"."""
    if "lora" not in params:
        return {"params": params}
    return {"params": {name: part for name, part in params.items() if name != "lora"}, "lora": params["lora"]}


def _no_past(config: DecoderConfig, rows: int) -> tuple[Past, ...]:
    return tuple(Past((), (), *states) for states in zip(*empty_states(config, rows, jnp.float32), strict=True))


def init_params(config: DecoderConfig, key: Array) -> Params:
    """Fresh parameters, float32, as a plain nested dict.

    Attention begins as a look-up: queries resemble the keys of their group (a token scores high with its like), and
    what a head writes resembles what it read.

        w_q <- (w_q + w_k) / sqrt(2)        w_o <- (w_o + w_v^T / sqrt(2 layers)) / sqrt(2)

    Source:
        Trockman and Kolter 2023, arXiv:2305.09828, whose W_q W_k^T and W_v W_o begin near multiples of the identity.
    """
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Decoder(config).init(key, tokens, tokens, _no_past(config, 1), segment_ids=tokens)["params"]
    layers = params["layers"]
    if len(config.pattern) == 1:
        return params | {"layers": _look_up(config, config.pattern[0], layers)}
    return params | {
        "layers": {str(i): _look_up(config, layer, layers[str(i)]) for i, layer in enumerate(config.pattern)}
    }


def _look_up(config: DecoderConfig, layer: Layer, block: Params) -> Params:
    if layer.kind == "delta" or layer.reads_keys:
        return block
    group = config.num_heads // block["k"].shape[2]
    q = (block["q"] + jnp.repeat(block["k"], group, axis=2)) / 2**0.5
    read = jnp.repeat(block["v"], group, axis=2).reshape(config.num_periods, config.model_dim, -1).swapaxes(1, 2)
    o = (block["o"] + read * (2 * config.num_layers) ** -0.5) / 2**0.5
    return block | {"q": q, "o": o}


def forward(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    *,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Float[Array, "B L D"]:
    """Hidden states of training rows; several trajectories may share a row, told apart by `segment_ids`.

    Args:
        positions: each token's place in its own trajectory, from 0.
        segment_ids: the trajectory of each token; padding has an id of its own (0).
        remat: compute a block's activations again in the backward pass in place of keeping them.
        mesh: that the rows lie on; None for one device.
    """
    pasts = _no_past(config, tokens.shape[0])
    hidden, _ = Decoder(config, remat, mesh).apply(
        _variables(params), tokens, positions, pasts, segment_ids=segment_ids
    )
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
    *,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B T D"], Entries]:
    """Hidden states of `tokens[b, :num_new[b]]` after row b's cached tokens, and what they add to the cache.

    Args:
        cache: read whole, so pass the bucket that holds the longest row (`cache.rows_of`).
        num_new: tokens to append per row; the rest of the row is padding.
        mesh: that the rows lie on; None for one device.
    """
    T = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(T)
    cached_at = [cached_positions(k.shape[3], cache.length) for k in cache.k]
    new_causal = (jnp.arange(T)[:, None] >= jnp.arange(T)[None, :])[None]
    is_real = jnp.arange(T) < num_new[:, None]
    pasts = tuple(
        Past((k,), (v,), conv, state)
        for k, v, conv, state in zip(cache.k, cache.v, cache.conv, cache.state, strict=True)
    )
    at = tuple((each, positions) for each in cached_at)
    model, masks = Decoder(config, mesh=mesh), tuple(((each >= 0)[:, None, :], new_causal) for each in cached_at)
    found: Any = model.apply(_variables(params), tokens, positions, pasts, masks, at, is_real)
    hidden, new = found
    state_of = jax.vmap(convolution_state, in_axes=(0, 0, None))
    return hidden, Entries(
        k=tuple(each["k"] for each in new),
        v=tuple(each["v"] for each in new),
        conv=tuple(state_of(each["conv_input"], conv, num_new) for each, conv in zip(new, cache.conv, strict=True)),
        state=tuple(each["state"] for each in new),
    )


def apart(config: DecoderConfig, stacked: Any) -> list[Any]:
    """A tree of arrays with a leading axis over periods, as a loop of decoding steps should hold it; see `together`.

    An unrolled decoder takes the part of each period out of the array. Inside a loop that copies it at every step: the
    whole cache. So there is a tree for each period, taken before the loop.
    """
    if not config.is_unrolled:
        return [stacked]
    return [jax.tree.map(operator.itemgetter(i), stacked) for i in range(config.num_periods)]


def together(config: DecoderConfig, parts: Sequence[Any]) -> Any:
    """What `apart` took apart. Nothing is copied: XLA replaces a part of the stacked by what was stacked."""
    return jax.tree.map(lambda *x: jnp.stack(x), *parts) if config.is_unrolled else parts[0]


def decode_step(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    stage: Stage,
    step: Int[Array, ""],
    tokens: Int[Array, " B"],
    is_live: Bool[Array, " B"],
) -> tuple[Float[Array, "B V"], Stage]:
    """Logits after one more token in each row, and the stage that holds it.

    A chunk of C steps leaves the cache alone: it writes to a *stage* of C entries, at index `step` in every row, so
    that a step moves little memory. `staged_entries` then says what each row really fed.

    Args:
        is_live: rows that feed this token. The recurrent state of the others stays as it is, since nothing takes a
            token back out of it; their logits are garbage.
    """
    positions = (cache.length + step)[:, None]
    C = stage.k[0].shape[3]
    cached_at = [cached_positions(k.shape[3], cache.length) for k in cache.k]
    staged = (jnp.arange(C) < step)[None, None, :]
    itself = jnp.ones((1, 1, 1), bool)
    at = tuple((each, cache.length[:, None] + jnp.arange(C), positions) for each in cached_at)
    pasts = tuple(
        Past(
            (cache.k[i], stage.k[i]),
            (cache.v[i], stage.v[i]),
            jax.lax.dynamic_slice_in_dim(stage.conv[i], step, cache.conv[i].shape[2], axis=2),
            stage.state[i],
        )
        for i in range(len(cache.k))
    )
    model, masks = Decoder(config), tuple(((each >= 0)[:, None, :], staged, itself) for each in cached_at)
    found: Any = model.apply(_variables(params), tokens[:, None], positions, pasts, masks, at, is_live[:, None])
    hidden, new = found
    logits: Any = model.apply(_variables(params), hidden[:, 0], method="unembed")

    def put(into: tuple[Array, ...], name: str, axis: int, start: Array) -> tuple[Array, ...]:
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, each[name].astype(old.dtype), start + old.shape[axis] - C, axis)
            for old, each in zip(into, new, strict=True)
        )

    return logits, Stage(
        k=put(stage.k, "k", 3, step),
        v=put(stage.v, "v", 3, step),
        # The first W - 1 inputs are those before the chunk.
        conv=put(stage.conv, "conv_input", 2, step),
        state=tuple(each["state"] for each in new),
    )
