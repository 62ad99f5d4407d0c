"""One layer of the decoder: a mixer of tokens, then a feed-forward layer or experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from searchrl_jax.models.config import DecoderConfig
from searchrl_jax.ops.attention import KeyBlock, attend, attend_causally
from searchrl_jax.ops.convolution import causal_convolution
from searchrl_jax.ops.delta import delta_chunks, delta_step, l2_normalised
from searchrl_jax.ops.experts import choose, mix_experts
from searchrl_jax.ops.linear import project
from searchrl_jax.ops.norm import rms_norm
from searchrl_jax.ops.rope import rotate
from searchrl_jax.parallel.rules import partition_spec, spread

# The axes of the residual stream on a mesh: between the halves of a layer a row's tokens are shared out, too.
STREAM = ("rows", "tokens", None)


@struct.dataclass
class Past:
    """What one layer (or, with a leading axis, that layer of every period) remembers.

    Blocks of keys and values, the last inputs of its convolutions, and the state of linear attention. What a layer has
    no use for is of size 0.
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    conv: Float[Array, "B W-1 I"]
    state: Float[Array, "B N H J"]


@struct.dataclass
class Shared:
    """What all layers see. Rows are packed (`segment_ids`, no past), or there is a mask per block of keys.

    Masks, the positions of each block's keys (the new ones among them) and rotary tables are those of each layer of the
    period; `is_real` is false where a token must leave no trace.
    """

    masks: tuple[tuple[Bool[Array, "#B #T S"], ...], ...]
    key_positions: tuple[tuple[Int[Array, "#B S"], ...], ...]
    positions: Int[Array, "B T"]
    is_real: Bool[Array, "B T"] | None
    tables: tuple[tuple[Float[Array, "B T half"], Float[Array, "B T half"]], ...]
    segment_ids: Int[Array, "B T"] | None


class RMSNorm(nn.Module):
    """`ops.norm.rms_norm` with a learned scale."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.param("scale", nn.initializers.ones, (x.shape[-1],)), epsilon=self.epsilon)


@jax.custom_vjp
def _no_gradient_waits(*values: Array) -> tuple[Array, ...]:
    """`values`, whose gradients are all made before any of them is used.

    Left to itself a compiler puts off the adapters' gradients, which nothing waits for, and keeps the activations of
    layer after layer for them.
    """
    return values


def _as_they_are(*values: Array) -> tuple[tuple[Array, ...], None]:
    return values, None


def _together(_: None, gradients: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(jax.lax.optimization_barrier(gradients))


_no_gradient_waits.defvjp(_as_they_are, _together)


class Block(nn.Module):
    """Layer `place` of the pattern. Takes what it may attend to, returns the stream and what it adds to the past."""

    config: DecoderConfig
    place: int = 0
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], past: Past, shared: Shared) -> tuple[Array, dict[str, Array]]:
        cfg = self.config
        h = self._whole_rows(RMSNorm(cfg.norm_epsilon, name="attention_norm")(x))
        mix = self._attention if cfg.period[self.place].kind == "attention" else self._delta
        mixed, new = mix(h, past, shared)
        out_scale = (2 * cfg.num_layers) ** -0.5
        w_o = self.param(
            "o", nn.initializers.normal(out_scale * mixed.shape[-1] ** -0.5), (mixed.shape[-1], cfg.model_dim)
        )
        mixed = self._adapted("o", mixed, w_o)
        if cfg.has_sinks:
            mixed = self._with_bias("o_bias", mixed, 1)
        if cfg.is_gemma:
            mixed = RMSNorm(cfg.norm_epsilon, name="attention_post_norm")(mixed)
        x = spread(x + mixed, self.mesh, STREAM)

        h = self._whole_rows(RMSNorm(cfg.norm_epsilon, name="mlp_norm")(x))
        made = self._feed_forward(h, out_scale) if cfg.experts is None else self._experts(h, out_scale)
        if not cfg.is_gemma:
            return spread(x + made, self.mesh, STREAM), new
        x = x + RMSNorm(cfg.norm_epsilon, name="mlp_post_norm")(made)
        # A buffer of the checkpoint, not a weight: nothing trains it.
        scale = jax.lax.stop_gradient(self.param("layer_scale", nn.initializers.ones, ()))
        return spread(x * scale.astype(x.dtype), self.mesh, STREAM), new

    def _whole_rows(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return spread(h, self.mesh, ("rows", None, None))

    def _attention(self, h: Float[Array, "B T D"], past: Past, shared: Shared) -> tuple[Array, dict[str, Array]]:
        """What the heads read, [B, T, N * H]."""
        cfg, layer = self.config, self.config.period[self.place]
        seeking = sought = h
        if cfg.conv_width:
            # A query that knows the last tokens and a key that knows the tokens before it: "what followed the last time
            # that I stood after these?" is then one layer's work.
            seeking = causal_convolution(h, self._kernel("conv_q", shift=0), past.conv, shared.segment_ids)
            sought = causal_convolution(h, self._kernel("conv_k", shift=1), past.conv, shared.segment_ids)

        q = self._projected("q", seeking, cfg.num_heads, layer.head_dim)
        k = self._projected("k", sought, layer.num_kv_heads, layer.head_dim)
        v = k if layer.reads_keys else self._projected("v", h, layer.num_kv_heads, layer.head_dim)
        if cfg.has_qkv_bias:
            q, k, v = (self._with_bias(name, y, 2) for name, y in (("q_bias", q), ("k_bias", k), ("v_bias", v)))
        if cfg.has_qk_norm:
            q, k = RMSNorm(cfg.norm_epsilon, name="q_norm")(q), RMSNorm(cfg.norm_epsilon, name="k_norm")(k)
        if cfg.is_gemma:
            v = rms_norm(v, jnp.ones(layer.head_dim), epsilon=cfg.norm_epsilon)
        q, k = rotate(q, *shared.tables[self.place]), rotate(k, *shared.tables[self.place])
        # Heads are shared out, never the tokens that a head looks through.
        q = spread(q, self.mesh, ("rows", None, "heads", None))
        k, v = (spread(y, self.mesh, ("rows", None, "kv_heads", None)) for y in (k, v))
        k_BKTH = k.transpose(0, 2, 1, 3)
        v_BKTH = v.transpose(0, 2, 1, 3)
        sink = self.param("sink", nn.initializers.normal(1.0), (cfg.num_heads,)) if cfg.has_sinks else None
        scale = 1.0 if cfg.is_gemma else None
        if shared.segment_ids is None:
            masks = shared.masks[self.place]
            if layer.window is not None:
                at_place = shared.key_positions[self.place]
                distances = [shared.positions[:, :, None] - at[:, None, :] for at in at_place]
                masks = tuple(mask & (far < layer.window) for mask, far in zip(masks, distances, strict=True))
            keys, values = (*past.k, k_BKTH), (*past.v, v_BKTH)
            blocks = [KeyBlock(*block) for block in zip(keys, values, masks, strict=True)]
            mixed = attend(q, blocks, scale=scale, sink=sink)
        else:
            mixed = attend_causally(q, k_BKTH, v_BKTH, shared.segment_ids, window=layer.window, scale=scale, sink=sink)
        mixed = spread(mixed, self.mesh, ("rows", None, "heads", None))
        if cfg.has_output_gate:
            mixed = mixed * jax.nn.sigmoid(self._projected("output_gate", h, cfg.num_heads, layer.head_dim))
        return mixed.reshape(*h.shape[:2], -1), {"k": k_BKTH, "v": v_BKTH, "conv_input": h, "state": past.state}

    def _delta(self, h: Float[Array, "B T D"], past: Past, shared: Shared) -> tuple[Array, dict[str, Array]]:
        """What the linear heads read, [B, T, N * J], normalised and gated.

        q, k and v go through one causal convolution and SiLU; q and k are then of unit length, and

            log_decay = -exp(log_rate) softplus(h decay + decay_bias)        beta = sigmoid(h beta)

        Source:
            Yang et al. 2024, arXiv:2412.06464, section 3.4; as in transformers' Qwen3_5GatedDeltaNet.
        """
        heads, (B, T, _) = self.config.delta, h.shape
        assert heads is not None
        N, group = heads.num_value_heads, heads.num_value_heads // heads.num_key_heads
        parts = (
            self._projected("q", h, heads.num_key_heads, heads.key_dim),
            self._projected("k", h, heads.num_key_heads, heads.key_dim),
            self._projected("v", h, N, heads.value_dim),
        )
        conv_input = jnp.concatenate([part.reshape(B, T, -1) for part in parts], axis=-1)
        kernel = self.param(
            "delta_conv", nn.initializers.normal(heads.conv_width**-0.5), (heads.conv_width, heads.channels)
        )
        convolved = jax.nn.silu(causal_convolution(conv_input, kernel, past.conv, shared.segment_ids))
        ends = [heads.num_key_heads * heads.key_dim, 2 * heads.num_key_heads * heads.key_dim]
        flat = jnp.split(convolved, ends, axis=-1)
        q, k, v = (y.reshape(part.shape).astype(jnp.float32) for y, part in zip(flat, parts, strict=True))
        q = jnp.repeat(l2_normalised(q) * heads.key_dim**-0.5, group, axis=2)
        k = jnp.repeat(l2_normalised(k), group, axis=2)
        q, k, v = (spread(y, self.mesh, ("rows", None, "heads", None)) for y in (q, k, v))

        dense = nn.initializers.normal(self.config.model_dim**-0.5)
        beta = jax.nn.sigmoid(project(h, self.param("beta", dense, (h.shape[-1], N))).astype(jnp.float32))
        rate = jnp.exp(self.param("log_rate", _log_rate, (N,)).astype(jnp.float32))
        step = project(h, self.param("decay", dense, (h.shape[-1], N)))
        step = self._with_bias("decay_bias", step.astype(jnp.float32), 1, nn.initializers.ones)
        log_decay = -rate * jax.nn.softplus(step)
        if shared.is_real is not None:
            log_decay, beta = (jnp.where(shared.is_real[..., None], y, 0) for y in (log_decay, beta))

        if T == 1 and shared.segment_ids is None:
            mixed, state = delta_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0], past.state)
            mixed = mixed[:, None]
        else:
            one = jnp.zeros((B, T), jnp.int32) if shared.segment_ids is None else shared.segment_ids
            mixed, state = delta_chunks(q, k, v, log_decay, beta, past.state, one)
        mixed = spread(mixed, self.mesh, ("rows", None, "heads", None))
        gate = self._projected("output_gate", h, N, heads.value_dim)
        mixed = RMSNorm(self.config.norm_epsilon, name="output_norm")(mixed.astype(h.dtype)) * jax.nn.silu(gate)
        none = jnp.zeros((B, 0, T, 0), h.dtype)
        return mixed.reshape(B, T, -1), {"k": none, "v": none, "conv_input": conv_input, "state": state}

    def _feed_forward(self, h: Float[Array, "B T D"], out_scale: float) -> Float[Array, "B T D"]:
        cfg = self.config
        dense = nn.initializers.normal(cfg.model_dim**-0.5)
        gate = self._adapted("gate", h, self.param("gate", dense, (cfg.model_dim, cfg.ff_dim)))
        up = self._adapted("up", h, self.param("up", dense, (cfg.model_dim, cfg.ff_dim)))
        w_down = self.param("down", nn.initializers.normal(out_scale * cfg.ff_dim**-0.5), (cfg.ff_dim, cfg.model_dim))
        gate = jax.nn.gelu(gate) if cfg.is_gemma else jax.nn.silu(gate)
        return self._adapted("down", gate * up, w_down)

    def _experts(self, h: Float[Array, "B T D"], out_scale: float) -> Float[Array, "B T D"]:
        cfg, experts = self.config, self.config.experts
        assert experts is not None
        E, D, F = experts.count, cfg.model_dim, cfg.ff_dim
        dense, zeros = nn.initializers.normal(D**-0.5), nn.initializers.zeros
        logits = project(h, self.param("router", dense, (D, E)))
        w_gate = self.param("expert_gate", dense, (E, D, F))
        w_up = self.param("expert_up", dense, (E, D, F))
        w_down = self.param("expert_down", nn.initializers.normal(out_scale * F**-0.5), (E, F, D))
        biases: tuple[Array, ...] = ()
        limit = experts.limit
        if limit is not None:
            logits = self._with_bias("router_bias", logits, 1)
            shapes = {"expert_gate_bias": (E, F), "expert_up_bias": (E, F), "expert_down_bias": (E, D)}
            biases = tuple(self.param(name, zeros, shape) for name, shape in shapes.items())

        def mixed(h: Array, weights: Array, index: Array, matrices: tuple, biases: tuple) -> Array:
            w_gate, w_up, w_down = (w.astype(h.dtype) for w in matrices)

            def expert(rows: Array, sizes: Array, of_row: Array) -> Array:
                gate, up = (jax.lax.ragged_dot(rows, w, sizes) for w in (w_gate, w_up))
                if limit is None:
                    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, w_down, sizes)
                of_gate, of_up, of_down = (bias.astype(h.dtype)[of_row] for bias in biases)
                gate, up = jnp.minimum(gate + of_gate, limit), jnp.clip(up + of_up, -limit, limit)
                # 1.702 makes it nearly GELU; the 1 lets the gate through where the input is 0.
                inside = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
                return jax.lax.ragged_dot(inside, w_down, sizes) + of_down

            x, weights, index = (each.reshape(-1, each.shape[-1]) for each in (h, weights, index))
            return mix_experts(x, weights, index, E, expert).reshape(h.shape)

        if self.mesh is not None and self.mesh.size > 1:
            mixed = _by_device(mixed, self.mesh, has_biases=bool(biases))
        return mixed(h, *choose(logits, experts.chosen), (w_gate, w_up, w_down), biases)

    def _projected(self, name: str, x: Float[Array, "B T D"], heads: int, size: int) -> Float[Array, "B T N H"]:
        dense = nn.initializers.normal(self.config.model_dim**-0.5)
        return self._adapted(name, x, self.param(name, dense, (x.shape[-1], heads, size)))

    def _adapted(self, name: str, x: Float[Array, "... D"], w: Float[Array, "D ..."]) -> Float[Array, "..."]:
        """x W, with (x A) B added where the parameters have adapters of this name (`models.lora`)."""
        if not self.has_variable("lora", name):
            return project(x, w)
        pair: dict[str, Array] = self.get_variable("lora", name)
        x, a, b = _no_gradient_waits(x, pair["a"], pair["b"])
        return project(x, w) + project(project(x, a), b)

    def _with_bias(self, name: str, x: Array, rank: int, init: Any = nn.initializers.zeros) -> Array:
        """`x` plus a bias over its last `rank` axes."""
        return x + self.param(name, init, x.shape[-rank:]).astype(x.dtype)

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


def _by_device(mixed: Callable[..., Array], mesh: Mesh, *, has_biases: bool) -> Callable[..., Array]:
    """`mixed` of a layer's experts, each device with its own rows and its share of every expert's width.

    Tokens are sorted by expert among those of a device: one order of all of them would bring every token everywhere.
    """
    rows, narrow, wide, deep = (
        partition_spec(axes) for axes in (("rows", None, None), (None, "ff"), (None, None, "ff"), (None, "ff", None))
    )

    def local(h: Array, weights: Array, index: Array, matrices: tuple, biases: tuple) -> Array:
        if has_biases:  # what an expert adds in the end is added by one of those that share it
            is_first = jax.lax.axis_index("tensor") == 0
            biases = (*biases[:2], jnp.where(is_first, biases[2], 0))
        return jax.lax.psum(mixed(h, weights, index, matrices, biases), "tensor")

    of_biases = (narrow, narrow, PartitionSpec()) if has_biases else ()
    return jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, (wide, wide, deep), of_biases), out_specs=rows)


def _log_rate(key: Array, shape: tuple[int, ...]) -> Array:
    """The logarithm of rates between 0.01 and 16, uniformly."""
    return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))
