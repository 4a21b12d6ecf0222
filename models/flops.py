"""The work that a model's mathematics asks for, whatever a program does to get it done."""

import numpy as np

from models.config import TransformerConfig


def training_flops(config: TransformerConfig, tokens: int, squares: int) -> float:
    """Floating-point operations of a decoder's training step, without recomputation.

    Matrix products take 2 for each parameter and token, and twice as many again in the backward
    pass (Kaplan et al., 2020). Causal attention inside segments takes half of each segment's
    square, for the scores and for the values.

    >>> config = TransformerConfig(vocab_size=10, num_layers=1, width=4, num_heads=2,
    ...                            num_kv_heads=1, mlp_width=8)
    >>> training_flops(config, tokens=1, squares=1)
    1128.0

    Args:
        config: the model.
        tokens: real positions in the batch.
        squares: the sum of the squares of its segments' lengths.
    """
    width, heads = config.width, config.num_heads * config.head_width
    keys = config.num_kv_heads * config.head_width
    layer = width * (2 * heads + 2 * keys) + 3 * width * config.mlp_width
    products = 6 * tokens * (config.num_layers * layer + width * config.vocab_size)
    return products + 6.0 * squares * heads * config.num_layers


def pair_flops(
    config: TransformerConfig, tokens: tuple[int, int], squares: tuple[int, int, int]
) -> float:
    """Floating-point operations of an encoder–decoder's training step, as `training_flops`.

    >>> config = TransformerConfig(vocab_size=10, num_layers=1, width=4, num_heads=2,
    ...                            num_kv_heads=1, mlp_width=8)
    >>> pair_flops(config, tokens=(0, 1), squares=(0, 1, 0)) > training_flops(config, 1, 1)
    True

    Args:
        config: the model.
        tokens: real positions of inputs and of targets in the batch.
        squares: the sums, over its pairs, of inputs by inputs, targets by targets, and inputs by
            targets.
    """
    width, heads = config.width, config.num_heads * config.head_width
    keys, mlp = config.num_kv_heads * config.head_width, 3 * width * config.mlp_width
    inputs, targets = tokens
    # Cross-attention takes queries from targets, and keys and values from inputs.
    of_inputs = width * (2 * heads + 2 * keys) + mlp + width * 2 * keys
    of_targets = width * (2 * heads + 2 * keys) + mlp + width * 2 * heads
    products = 6 * config.num_layers * (inputs * of_inputs + targets * of_targets)
    products += 6 * targets * width * config.vocab_size
    scores = 2 * squares[0] + squares[1] + 2 * squares[2]  # half of causal ones
    return products + 6.0 * scores * heads * config.num_layers


def step_flops(config: TransformerConfig, lengths: np.ndarray, *, bidirectional: bool) -> float:
    """Floating-point operations of a training step on a packed batch.

    Args:
        config: the model.
        lengths: positions of each segment, int [segments, 1], or of inputs and targets, [segments,
            2].
        bidirectional: whether a decoder's attention sees both ways, as an encoder's does.
    """
    squares = lengths.T @ lengths
    if len(squares) == 1:
        return training_flops(config, int(lengths.sum()), int(squares[0, 0]) * (1 + bidirectional))
    inputs, targets = lengths.sum(axis=0).tolist()
    mixed = int(squares[0, 0]), int(squares[1, 1]), int(squares[0, 1])
    return pair_flops(config, (inputs, targets), mixed)
