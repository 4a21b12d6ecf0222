"""A bidirectional encoder over packed rows, which predicts each token."""

from models.decoder import Decoder


class Encoder(Decoder):
    """Predicts every token from its whole segment, before and after it.

    Built like `Decoder`, but not causal; for masked tokens (BERT, Devlin et al., 2019).
    """

    causal = False
