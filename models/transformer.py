"""A stack of Transformer layers, and the table of token vectors before and after it.

Decoder, encoder and encoder–decoder are these two put together in different ways.
Shape letters are explained in `models/__init__.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.attention import Attend, make_attention
from models.config import TransformerConfig
from models.layers import Attention, RMSNorm, SwiGLU
from models.mesh import gather_table, split_batch
from models.visibility import KEPT

# Small, as in GPT-2: with shared input and output vectors, larger ones would make a fresh model
# predict that each token repeats itself, and the first loss far above ln(vocab_size).
EMBEDDING_SCALE = 0.02


class Embedding(nnx.Module):
    """Token vectors, used on the way in and, transposed, on the way out (Press and Wolf, 2017)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        self.table = nnx.Param(jax.random.normal(rngs.params(), shape) * EMBEDDING_SCALE)
        self.dtype = config.compute_dtype

    def __call__(self, tokens_BL: Array) -> Array:
        """Return [B, L, D] in the compute dtype."""
        return split_batch(gather_table(self.table[...].astype(self.dtype))[tokens_BL])

    def logits(self, x_BLD: Array) -> Array:
        """Return float32 [B, L, V]."""
        table_VD = self.table[...].astype(x_BLD.dtype)
        return jnp.einsum("BLD,VD->BLV", x_BLD, table_VD, preferred_element_type=jnp.float32)


class Layer(nnx.Module):
    """Attention, then attention to a memory if there is one, then feed-forward; each is added.

    Norms come first in each branch, so the residual stream itself is never scaled (pre-norm).
    """

    def __init__(self, config: TransformerConfig, *, cross: bool, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config, rngs=rngs)
        if cross:
            self.cross_norm = RMSNorm(config.width)
            self.cross_attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(
        self,
        x_BLD: Array,
        positions_BL: Array,
        attend: Attend,
        memory: tuple[Array, Attend] | None = None,
    ) -> Array:
        """Return [B, L, D]; `memory` is vectors [B, S, D], and the attention to them."""
        x_BLD += self.attention(self.attention_norm(x_BLD), positions_BL, attend)
        if memory is not None:
            x_BLD += self.cross_attention.across(self.cross_norm(x_BLD), *memory)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Transformer(nnx.Module):
    """`num_layers` layers and a last norm, run one by one or as a loop over stacked parameters.

    `scan_layers` keeps each parameter once, with a leading axis of num_layers, so that the layer
    is compiled once whatever the depth.
    """

    def __init__(self, config: TransformerConfig, *, causal: bool, cross: bool, rngs: nnx.Rngs):
        def layer(rngs: nnx.Rngs) -> Layer:
            return Layer(config, cross=cross, rngs=rngs)

        self.layers: Any  # one Layer with stacked parameters, or a list of Layers
        if config.scan_layers:
            self.layers = nnx.split_rngs(splits=config.num_layers)(nnx.vmap(layer))(rngs)
        else:
            self.layers = nnx.List([layer(rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.width)
        self.causal = causal
        self.config = config

    def __call__(
        self,
        x_BLD: Array,
        segment_ids_BL: Array,
        positions_BL: Array,
        memory: tuple[Array, Array] | None = None,
        visible_until_BL: Array | None = None,
        segment_offsets: tuple[Array | None, Array | None] = (None, None),
    ) -> Array:
        """Return the last hidden states, normed: [B, L, D] in x's dtype.

        `memory` is (vectors [B, S, D], segment ids [B, S]). Without causal order, positions may
        have several dimensions, [B, L, A]. `segment_offsets`, [B, M+1], are those of the rows and
        of the memory, for attention that takes them.
        """
        scan = self.config.scan_layers
        options: Any = {
            "implementation": self.config.attention,
            "dtype": x_BLD.dtype,
            "head_width": self.config.head_width,
        }
        attend = make_attention(
            segment_ids_BL,
            positions=positions_BL if positions_BL.ndim == 2 else None,
            visible_until=visible_until_BL,
            segment_offsets=segment_offsets[0],
            causal=self.causal,
            window=self.config.window,
            **options,
        )
        across: tuple[Array, Attend] | None = None
        if memory is not None:
            memory_BSD, ids_BS = memory
            across = (
                memory_BSD,
                make_attention(
                    segment_ids_BL,
                    kv_segment_ids=ids_BS,
                    segment_offsets=segment_offsets[0],
                    kv_segment_offsets=segment_offsets[1],
                    causal=False,
                    **options,
                ),
            )
        graph, _ = nnx.split(self.layers if scan else self.layers[0])

        def run(x_BLD, parameters):
            layer = nnx.merge(graph, parameters)
            return split_batch(layer(x_BLD, positions_BL, attend, across)), None

        if self.config.remat:
            kept = jax.checkpoint_policies.save_only_these_names(KEPT)
            run = jax.checkpoint(run, prevent_cse=not scan, policy=kept)
        if scan:
            x_BLD, _ = jax.lax.scan(run, x_BLD, nnx.state(self.layers))
        else:
            for layer in self.layers:
                x_BLD, _ = run(x_BLD, nnx.state(layer))
        return self.norm(x_BLD)
