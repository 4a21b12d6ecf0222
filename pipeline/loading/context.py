"""Context parallelism: the order of the columns of a row whose length is divided over devices.

With causal attention, the last columns of a long segment see many keys and the first see few. So
contiguous parts of a row cost different amounts: with one segment in four parts, the last part
costs 1.75 times the mean. Two other orders give each part columns from the whole row.
"""

from typing import Literal, get_args

import numpy as np

from pipeline.errors import require_one_of

ContextOrder = Literal["contiguous", "zigzag", "striped"]
CONTEXT_ORDERS: tuple[ContextOrder, ...] = get_args(ContextOrder)


def num_chunks(order: ContextOrder, parts: int) -> int:
    """The number that a length must be a multiple of, to be divided into `parts` in this order.

    Raises:
        ValueError: there is no such order.
    """
    require_one_of("context_order", order, CONTEXT_ORDERS)
    return 2 * parts if order == "zigzag" and parts > 1 else parts


def column_order(order: ContextOrder, length: int, parts: int) -> np.ndarray:
    """For each column of a batch, the column of the planned row that it holds: int64 [length].

    Part `p` of `P` parts has the columns

    - "contiguous": from `p·length/P` to `(p+1)·length/P`;
    - "zigzag": chunks `p` and `2P-1-p` of `2P` (Megatron-LM; "dual chunk swap" elsewhere);
    - "striped": `p`, `p+P`, `p+2P`, … (Brandon et al., 2023).

    >>> column_order("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    >>> column_order("striped", 8, 2).tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]

    Args:
        order: as above.
        length: a multiple of `num_chunks(order, parts)`.
        parts: the number of parts, from 1.
    """
    columns = np.arange(length)
    if order == "contiguous":
        return columns
    if order == "striped":
        return columns.reshape(-1, parts).T.ravel()
    first, last = np.split(columns.reshape(2 * parts, -1), 2)
    return np.stack([first, last[::-1]], axis=1).ravel()
