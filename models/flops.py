"""The operations that a model's mathematics needs, however a program computes them."""

import numpy as np

from models.config import TransformerConfig


def step_flops(
    config: TransformerConfig,
    lengths: np.ndarray,
    *,
    bidirectional: bool = False,
    trees: np.ndarray | None = None,
) -> float:
    """Floating-point operations of a training step on a packed batch, without recomputation.

    Matrix products take 2 for each parameter and token, and twice as many again in the backward
    pass (Kaplan et al., 2020). Attention inside segments takes the square of each segment's length,
    for the scores and for the values, and causal attention half of that.

    >>> config = TransformerConfig(vocab_size=10, num_layers=1, width=4, num_heads=2,
    ...                            num_kv_heads=1, mlp_width=8)
    >>> step_flops(config, np.array([[1]]))
    1128.0

    Args:
        config: the model.
        lengths: positions of each segment, int [segments, 1], or of inputs and targets of an
            encoder–decoder, [segments, 2].
        bidirectional: whether a decoder's attention sees both ways, as an encoder's does.
        trees: for segments that may be groups, int [segments, 3]. If the second column, the number
            of branches, is above 0, the third replaces the square of the segment's length: twice
            the pairs of columns of which one sees the other, or itself, less the columns.
    """
    width, heads = config.width, config.num_heads * config.head_width
    keys = config.num_kv_heads * config.head_width
    tokens, by_sides = lengths.sum(axis=0), lengths.T @ lengths
    squares = by_sides[-1, -1]
    if trees is not None:  # a group computes its prefix once
        squares = np.where(trees[:, 1] > 0, trees[:, 2], lengths[:, 0] ** 2).sum()
    layer = width * (2 * heads + 2 * keys) + 3 * width * config.mlp_width
    products = tokens.sum() * layer
    scores = float(squares) * (1 + bidirectional)
    if len(tokens) == 2:  # cross-attention has queries of targets, keys and values of inputs
        products += width * (tokens[0] * 2 * keys + tokens[1] * 2 * heads)
        scores += 2 * (by_sides[0, 0] + by_sides[0, 1])  # these are not causal
    products = products * config.num_layers + tokens[-1] * width * config.vocab_size
    return float(6 * products + 6 * scores * heads * config.num_layers)
