"""A bidirectional encoder over packed rows: a guess of each token.

Shape letters are explained in `models/__init__.py`.
"""

from flax import nnx
from jax import Array

from models.config import TransformerConfig
from models.transformer import Embedding, Transformer


class Encoder(nnx.Module):
    """Reads every position in the light of its whole segment, before and after it.

    Built as `Decoder` is, but not causal; for masked tokens (BERT, Devlin et al., 2019).
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embedding = Embedding(config, rngs=rngs)
        self.transformer = Transformer(config, causal=False, cross=False, rngs=rngs)

    def __call__(self, inputs: Array, segment_ids: Array, positions: Array) -> Array:
        """Return float32 logits [B, L, V] from int32 tokens, segment ids and positions [B, L]."""
        hidden_BLD = self.transformer(self.embedding(inputs), segment_ids, positions)
        return self.embedding.logits(hidden_BLD)
