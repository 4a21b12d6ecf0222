"""Transformers in Flax NNX whose attention never crosses a segment, and their loss.

Shape letters, used in names throughout the package (`x_BLD` is a batch of rows of vectors):

| letter | meaning                                    |
| ------ | ------------------------------------------ |
| B      | rows of the batch                          |
| L      | positions in a row (the queries' side)     |
| S      | positions in a row of keys and values      |
| D      | width of the residual stream               |
| F      | width inside the feed-forward layer        |
| N      | query heads                                |
| G      | key and value heads (N is a multiple of G) |
| K      | width of one head                          |
| V      | tokens in the vocabulary                   |
"""

from models.config import TransformerConfig
from models.decoder import Decoder
from models.encoder import Encoder
from models.encoder_decoder import EncoderDecoder
from models.flops import step_flops
from models.loss import chunked_cross_entropy, cross_entropy
from models.vision import PatchEncoder, VisionDecoder

__all__ = [
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "PatchEncoder",
    "TransformerConfig",
    "VisionDecoder",
    "chunked_cross_entropy",
    "cross_entropy",
    "step_flops",
]
