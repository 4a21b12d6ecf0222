"""Cuts: how many tokens of continuations stay, so that groups have no more columns than a limit."""

from typing import NamedTuple

import numpy as np

from pipeline.corpus.side import Side
from pipeline.corpus.views.trees import Tree
from pipeline.planning.layout import count_before


class Cut(NamedTuple):
    """The sizes of nodes of groups that are cut.

    Attributes:
        sizes: the number of tokens that stay of each node: uint32 [nodes]; all 0 for a group that
            is left out.
        alike: the number of groups that are left out, since all their continuations are the same in
            the tokens that stay, and differed before.
        partly: the number of groups that stay, though that is true of some of their continuations.
    """

    sizes: np.ndarray
    alike: int
    partly: int


def cut_groups(side: Side, tree: Tree, sizes: np.ndarray, max_length: int) -> Cut:
    """Cuts the continuations of groups that have more than `max_length` columns.

    In each, the longest lose their last tokens, and end up equally long, give or take one. A group
    that is too long even with one token in each continuation is left out.

    Args:
        side: the tokens of the nodes.
        tree: the parents of the nodes.
        sizes: the number of tokens of each node.
        max_length: the most columns of a group.
    """
    nodes, group, counts = tree.lay_out(sizes), tree.group, len(tree.counts)
    lengths, stored = nodes.sum(nodes.columns), sizes.astype(np.int64)
    # The columns that the continuations of each group may have together, each at least one.
    leaves = np.bincount(group, stored * tree.branch, counts).astype(np.int64)
    room = max_length - lengths + leaves
    longer, fits = lengths > max_length, room >= nodes.sum(tree.branch)
    stay = np.where((longer & ~fits)[group], 0, stored)
    leaf_nodes = np.flatnonzero(tree.branch & (longer & fits)[group])
    owners, leaf_sizes = group[leaf_nodes], stored[leaf_nodes]

    def total(numbers: np.ndarray) -> np.ndarray:
        return np.bincount(owners, numbers, counts).astype(np.int64)

    # The most tokens that each continuation of a group may have, found by bisection.
    low, high = np.ones_like(room), np.full_like(room, max_length)
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = total(np.minimum(leaf_sizes, middle[owners])) <= room
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    most = low[owners]
    short_sizes = np.minimum(leaf_sizes, most)
    cut, left = np.flatnonzero(leaf_sizes > most), room - total(short_sizes)
    short_sizes[cut] += count_before(owners[cut], np.ones_like(cut)) < left[owners[cut]]
    stay[leaf_nodes] = short_sizes
    alike, partly = _find_alike(side, tree, leaf_nodes, leaf_sizes, most)
    stay[np.isin(group, alike)] = 0
    return Cut(stay.astype(np.uint32), len(alike), len(partly))


def _find_alike(
    side: Side, tree: Tree, leaf_nodes: np.ndarray, leaf_sizes: np.ndarray, most: np.ndarray
) -> tuple[list[int], list[int]]:
    """The groups whose continuations differ, but not in the first tokens that stay.

    And those of which that is true of some. `leaf_nodes` are the nodes that are continuations,
    `leaf_sizes` their tokens, and `most` the tokens that stay of each; one that has a token more,
    since a group has room for it, is compared without.
    """
    group, parent = tree.group[leaf_nodes], tree.parent[leaf_nodes]
    shown = np.minimum(leaf_sizes, most)
    # Those that have as many tokens, after one parent, as another one, of which some are cut.
    kinds = parent * (1 + shown.max(initial=0)) + shown
    _, kind, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    wanted = (counts > 1) & (np.bincount(kind, leaf_sizes > most) > 0)
    chosen = np.flatnonzero(wanted[kind])
    # By group and kind, the tokens that stay, and all.
    heads: dict[tuple[int, int], set[bytes]] = {}
    wholes: dict[tuple[int, int], set[bytes]] = {}
    numbers, sizes = leaf_nodes[chosen], leaf_sizes[chosen]
    for block, fields in side.read_blocks(numbers, 0 * numbers, sizes):
        continuations = np.split(fields["inputs"], np.cumsum(sizes[block])[:-1])
        at = chosen[block]
        keys = zip(group[at].tolist(), kind[at].tolist(), strict=True)
        for key, tokens, stay in zip(keys, continuations, most[at].tolist(), strict=True):
            heads.setdefault(key, set()).add(tokens[:stay].tobytes())
            wholes.setdefault(key, set()).add(tokens.tobytes())
    fewer = {key for key, some in heads.items() if len(some) < len(wholes[key])}
    total = np.bincount(group)
    alike = {of for of, n in fewer if counts[n] == total[of] and len(heads[of, n]) == 1}
    return [*alike], [*({of for of, _ in fewer} - alike)]
