"""A decoder-only Transformer: a language model over packed rows.

Shape letters are explained in `models/__init__.py`.
"""

from typing import Any

from flax import nnx
from jax import Array

from models.config import TransformerConfig
from models.transformer import Embedding, Transformer


class Decoder(nnx.Module):
    """Predicts the next token at every position, from the tokens before it in its segment.

    A packed row gives the logits that its segments would give alone: attention stays inside a
    segment, and rotary positions come from `positions`, not from places in the row.

    >>> import jax, jax.numpy as jnp
    >>> config = TransformerConfig(vocab_size=11, num_layers=1, width=8, num_heads=2,
    ...                            num_kv_heads=1, mlp_width=16)
    >>> model = Decoder(config, rngs=nnx.Rngs(0))
    >>> inputs, segment_ids, positions = jnp.array([[[5, 6, 7, 0]], [[1, 1, 2, 0]], [[0, 1, 0, 0]]])
    >>> jax.eval_shape(model, inputs, segment_ids, positions)
    ShapeDtypeStruct(shape=(1, 4, 11), dtype=float32)
    """

    causal = True

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embedding = Embedding(config, rngs=rngs)
        self.transformer = Transformer(config, causal=self.causal, cross=False, rngs=rngs)

    def __call__(self, *fields: Any, **more: Any) -> Array:
        """Return float32 logits [B, L, V] from the arguments of `hidden`."""
        return self.embedding.logits(self.hidden(*fields, **more))

    def hidden(
        self,
        inputs: Array,
        segment_ids: Array,
        positions: Array,
        visible_until: Array | None = None,
        segment_offsets: Array | None = None,
    ) -> Array:
        """Return the vectors [B, L, D] from which `embedding.logits` makes the logits.

        Tokens, segment ids and positions are int32 [B, L]. `visible_until`, int32 [B, L], is a
        field of batches with groups: continuations of one prefix, which do not see one another.
        `segment_offsets`, int32 [B, M+1], are another, for attention that takes them.
        """
        return self.transformer(
            self.embedding(inputs),
            segment_ids,
            positions,
            visible_until_BL=visible_until,
            segment_offsets=(segment_offsets, None),
        )
