"""The parts of every Transformer here: norm, rotary positions, attention, feed-forward.

`models/transformer.py` adds residual sums and places the norms. Shape letters are explained in
`models/__init__.py`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.attention import Attend
from models.config import TransformerConfig


class RMSNorm(nnx.Module):
    """Scale every vector to a mean square of one (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: Array) -> Array:
        """Return [..., D] in the dtype of x [..., D]."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(mean_square + 1e-6) * self.scale[...]).astype(x.dtype)


def rotate(x_BLNK: Array, positions_BL: Array, theta: float) -> Array:
    """Return x with number pairs (i, i + K/2) turned by position · theta^(−2i/K), dtype kept.

    The product of a turned query and key depends on the difference of their positions only
    (RoPE, Su et al., 2021). Angles are float32: bfloat16 cannot tell position 257 from 256.
    Positions in several dimensions, [B, L, A], turn an equal share of the pairs each.
    """
    half = x_BLNK.shape[-1] // 2
    positions_BL1A = positions_BL.astype(jnp.float32).reshape(*positions_BL.shape[:2], 1, -1)
    share = half // positions_BL1A.shape[-1]
    frequencies_K = theta ** (-jnp.arange(share, dtype=jnp.float32) / share)
    angles_BL1K = (positions_BL1A[..., None] * frequencies_K).reshape(
        *positions_BL.shape[:2], 1, half
    )
    sine, cosine = jnp.sin(angles_BL1K), jnp.cos(angles_BL1K)
    a, b = jnp.split(x_BLNK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    return turned.astype(x_BLNK.dtype)


class Attention(nnx.Module):
    """Grouped-query attention inside segments: from the queries' own row, or from another row.

    Each projection is initialised to keep the variance of its input. Since 2·num_layers outputs
    join the residual stream, the output's initial variance is smaller by that factor.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, N, G, K = config.width, config.num_heads, config.num_kv_heads, config.head_width
        self.query = nnx.Param(_normal(rngs, (D, N, K), fan_in=D))
        self.key = nnx.Param(_normal(rngs, (D, G, K), fan_in=D))
        self.value = nnx.Param(_normal(rngs, (D, G, K), fan_in=D))
        self.out = nnx.Param(_normal(rngs, (N, K, D), fan_in=D * 2 * config.num_layers))
        self.config = config

    def __call__(self, x_BLD: Array, positions_BL: Array, attend: Attend) -> Array:
        """Return [B, L, D]: for each position, a mean over its own segment of the same row."""
        q_BLNK, k_BLGK, v_BLGK = self._project(x_BLD, x_BLD)
        theta = self.config.rope_theta
        q_BLNK, k_BLGK = (rotate(x, positions_BL, theta) for x in (q_BLNK, k_BLGK))
        return self._join(attend(q_BLNK, k_BLGK, v_BLGK))

    def across(self, x_BLD: Array, memory_BSD: Array, attend: Attend) -> Array:
        """Return [B, L, D]: for each position, a mean over its segment of the memory.

        No rotary positions: the distance of positions in two different sequences means nothing.
        """
        return self._join(attend(*self._project(x_BLD, memory_BSD)))

    def _project(self, x_BLD: Array, memory_BSD: Array) -> tuple[Array, Array, Array]:
        dtype = x_BLD.dtype
        q_BLNK = jnp.einsum("BLD,DNK->BLNK", x_BLD, self.query[...].astype(dtype))
        k_BSGK = jnp.einsum("BSD,DGK->BSGK", memory_BSD, self.key[...].astype(dtype))
        v_BSGK = jnp.einsum("BSD,DGK->BSGK", memory_BSD, self.value[...].astype(dtype))
        return q_BLNK, k_BSGK, v_BSGK

    def _join(self, out_BLNK: Array) -> Array:
        return jnp.einsum("BLNK,NKD->BLD", out_BLNK, self.out[...].astype(out_BLNK.dtype))


class SwiGLU(nnx.Module):
    """Feed-forward layer with a gate: (silu(x·gate) * (x·up))·down (Shazeer, 2020)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        D, F = config.width, config.mlp_width
        self.gate = nnx.Param(_normal(rngs, (D, F), fan_in=D))
        self.up = nnx.Param(_normal(rngs, (D, F), fan_in=D))
        self.down = nnx.Param(_normal(rngs, (F, D), fan_in=F * 2 * config.num_layers))

    def __call__(self, x_BLD: Array) -> Array:
        """Return [B, L, D] in x's dtype."""
        gate_DF, up_DF, down_FD = (
            p[...].astype(x_BLD.dtype) for p in (self.gate, self.up, self.down)
        )
        return (jax.nn.silu(x_BLD @ gate_DF) * (x_BLD @ up_DF)) @ down_FD


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], *, fan_in: int) -> Array:
    return jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
