"""A bidirectional encoder over packed rows: a guess of each token."""

from models.decoder import Decoder


class Encoder(Decoder):
    """Reads every position in the light of its whole segment, before and after it.

    Built as `Decoder` is, but not causal; for masked tokens (BERT, Devlin et al., 2019).
    """

    causal = False
