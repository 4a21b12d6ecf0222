"""An encoder–decoder Transformer over packed pairs of rows.

Shape letters are explained in `models/__init__.py`; S is the length of the encoder's rows, L of
the decoder's.
"""

from typing import Any

from flax import nnx
from jax import Array

from models.config import TransformerConfig
from models.transformer import Embedding, Transformer


class EncoderDecoder(nnx.Module):
    """Predicts each next target token from the targets before it and all of its own inputs.

    A row packs several pairs: segment 3 of the targets attends to segment 3 of the inputs in the
    same row, and to nothing else. Both stacks have `num_layers` layers and share token vectors.

    >>> import jax, jax.numpy as jnp
    >>> config = TransformerConfig(vocab_size=11, num_layers=1, width=8, num_heads=2,
    ...                            num_kv_heads=1, mlp_width=16)
    >>> model = EncoderDecoder(config, rngs=nnx.Rngs(0))
    >>> inputs, inputs_segment_ids, inputs_positions = jnp.array(
    ...     [[[5, 6, 7, 0]], [[1, 1, 2, 0]], [[0, 1, 0, 0]]])
    >>> decoder_inputs, targets_segment_ids, targets_positions = jnp.array(
    ...     [[[0, 8, 0]], [[1, 1, 2]], [[0, 1, 0]]])
    >>> jax.eval_shape(model, inputs, inputs_segment_ids, inputs_positions,
    ...                decoder_inputs, targets_segment_ids, targets_positions)
    ShapeDtypeStruct(shape=(1, 3, 11), dtype=float32)
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embedding = Embedding(config, rngs=rngs)
        self.encoder = Transformer(config, causal=False, cross=False, rngs=rngs)
        self.decoder = Transformer(config, causal=True, cross=True, rngs=rngs)

    def __call__(self, *fields: Any, **more: Any) -> Array:
        """Return float32 logits [B, L, V] from the arguments of `hidden`."""
        return self.embedding.logits(self.hidden(*fields, **more))

    def hidden(
        self,
        inputs: Array,
        inputs_segment_ids: Array,
        inputs_positions: Array,
        decoder_inputs: Array,
        targets_segment_ids: Array,
        targets_positions: Array,
        inputs_segment_offsets: Array | None = None,
        targets_segment_offsets: Array | None = None,
    ) -> Array:
        """Return the vectors [B, L, D] from which `embedding.logits` makes the logits.

        The first three arguments are int32 [B, S], the next three [B, L]. Offsets, int32 [B, M+1],
        are for attention that takes them.
        """
        memory_BSD = self.encoder(
            self.embedding(inputs),
            inputs_segment_ids,
            inputs_positions,
            segment_offsets=(inputs_segment_offsets, None),
        )
        return self.decoder(
            self.embedding(decoder_inputs),
            targets_segment_ids,
            targets_positions,
            memory=(memory_BSD, inputs_segment_ids),
            segment_offsets=(targets_segment_offsets, inputs_segment_offsets),
        )
