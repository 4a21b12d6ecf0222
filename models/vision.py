"""A decoder of text with pictures, packed: a row has texts, and the patches of their pictures.

Shape letters are explained in `models/__init__.py`; here, S is the patches in a row, and P the
numbers in a patch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.config import TransformerConfig
from models.mesh import split_batch
from models.transformer import Embedding, Transformer


class PatchEncoder(nnx.Module):
    """Vectors of patches, each from all patches of its picture.

    Rotary positions are two: half of a head turns with a patch's row, half with its column. Heads
    need a width that is a multiple of 4.
    """

    def __init__(self, config: TransformerConfig, patch_size: int, *, rngs: nnx.Rngs):
        shape = (patch_size, config.width)
        self.patches = nnx.Param(jax.random.normal(rngs.params(), shape) * patch_size**-0.5)
        self.transformer = Transformer(config, causal=False, cross=False, rngs=rngs)
        self.dtype = config.compute_dtype

    def __call__(self, patches: Array, patch_image: Array, patch_yx: Array) -> Array:
        """Return [B, S, D].

        Args:
            patches: uint8 [B, S, P].
            patch_image: int32 [B, S], the picture of each patch in its row, from 0; −1: padding.
            patch_yx: int32 [B, S, 2], its row and column there.
        """
        pixels_BSP = patches.astype(self.dtype) / 127.5 - 1
        x_BSD = split_batch(pixels_BSP @ self.patches[...].astype(self.dtype))
        return self.transformer(x_BSD, patch_image + 1, patch_yx)


class VisionDecoder(nnx.Module):
    """Predicts the next token from the tokens before it, some of which stand for patches.

    The vector of a patch is added to that of the token that points to it. A packed row gives the
    logits that its segments would give alone.

    >>> config = TransformerConfig(vocab_size=11, num_layers=1, width=8, num_heads=2,
    ...                            num_kv_heads=1, mlp_width=16)
    >>> model = VisionDecoder(config, 12, rngs=nnx.Rngs(0))
    >>> inputs, segment_ids, positions, patch = jnp.array(
    ...     [[[5, 9, 7, 0]], [[1, 1, 2, 0]], [[0, 1, 0, 0]], [[-1, 1, -1, -1]]])
    >>> patches, patch_image = jnp.zeros((1, 3, 12), jnp.uint8), jnp.array([[0, 0, -1]])
    >>> jax.eval_shape(model, inputs, segment_ids, positions,
    ...                patches, patch_image, jnp.zeros((1, 3, 2), int), patch)
    ShapeDtypeStruct(shape=(1, 4, 11), dtype=float32)
    """

    def __init__(self, config: TransformerConfig, patch_size: int, *, rngs: nnx.Rngs):
        self.embedding = Embedding(config, rngs=rngs)
        self.encoder = PatchEncoder(config, patch_size, rngs=rngs)
        self.decoder = Transformer(config, causal=True, cross=False, rngs=rngs)

    def __call__(self, *fields: Any, **more: Any) -> Array:
        """Return float32 logits [B, L, V] from the arguments of `hidden`."""
        return self.embedding.logits(self.hidden(*fields, **more))

    def hidden(
        self,
        inputs: Array,
        segment_ids: Array,
        positions: Array,
        patches: Array,
        patch_image: Array,
        patch_yx: Array,
        patch: Array,
        segment_offsets: Array | None = None,
    ) -> Array:
        """Return the vectors [B, L, D] from which `embedding.logits` makes the logits.

        `patch`, int32 [B, L], is the column of the patch that a token stands for, or −1. The other
        arguments are those of `Decoder` and `PatchEncoder`; patches have no offsets.
        """
        seen_BSD = self.encoder(patches, patch_image, patch_yx)
        x_BLD = self.embedding(inputs) + follow(seen_BSD, patch)
        return self.decoder(x_BLD, segment_ids, positions, segment_offsets=(segment_offsets, None))


def follow(values_BSD: Array, pointer_BL: Array) -> Array:
    """Return [B, L, D]: the values that a pointer points to, zeros where it is −1."""
    found_BLD = jnp.take_along_axis(values_BSD, jnp.maximum(pointer_BL, 0)[:, :, None], axis=1)
    return jnp.where(pointer_BL[:, :, None] >= 0, found_BLD, 0)
