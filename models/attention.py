"""Attention inside segments: one function, its implementations, and the choice among them.

Shape letters are explained in `models/__init__.py`.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from models.blocked import blocked_attention, needed_blocks
from models.mesh import count_length_parts, per_device, repeat_heads, splits_length
from models.nvidia import (
    SKIPPING,
    find_flaw,
    key_ranges,
    packed_attention,
    tokamax_attention,
)
from models.splash import splash_attention, splash_available, splash_masked
from models.visibility import Visibility, by_segment, causal_until, seen, segment_ends

IMPLEMENTATIONS = ("auto", "dense", "blocked", "splash", "cudnn", *SKIPPING)
LONGEST_CUDNN = 16_384  # positions of a row; its mask takes 2 bytes for each query and key

Attend = Callable[[Array, Array, Array], Array]


def make_attention(
    segment_ids: Array,
    *,
    kv_segment_ids: Array | None = None,
    positions: Array | None = None,
    visible_until: Array | None = None,
    segment_offsets: Array | None = None,
    kv_segment_offsets: Array | None = None,
    causal: bool = True,
    window: int | None = None,
    implementation: str = "auto",
    dtype: DTypeLike = "float32",
    head_width: int = 64,
) -> Attend:
    """Return `attend(q, k, v)`: for each query, the weighted mean of the values that it sees.

    Call this once a step, since it finds the keys that queries see, and call `attend` in every
    layer. `attend` takes queries [B, L, N, K], and keys and values [B, S, G, K]; N is a multiple of
    G, and N/G neighbouring query heads share a key. It returns [B, L, N, K] in the queries' dtype.

    A query sees the keys of its own segment: with `causal` those at or before its column in the
    row, with `window=w` those fewer than w columns away. Segment 0 is padding: it sees nothing, is
    seen by nothing, and its outputs and gradients are exactly zero. So are the outputs of a query
    whose segment has no keys at all. Segments are contiguous.

    For segment ids [1, 1, 2, 2, 0], causal, the columns seen are 0 | 0 1 | 2 | 2 3 | none.

    In a group, several continuations follow the prefix that they share, and do not see one another.
    For `visible_until` [4, 3, 3, 4, 0], a prefix of one column with continuations of two columns
    and of one, the columns seen are 0 | 0 1 | 0 1 2 | 0 3 | none.

    Under a mesh with an axis `context`, each device computes its part of a row's queries against
    all keys. Without `visible_until`, the columns of a row may then be in any order:
    `positions` of one segment are compared instead of columns.

    | implementation | where | other segments |
    | -------------- | ----- | -------------- |
    | dense | everywhere; short rows | computed |
    | blocked | everywhere | skipped |
    | splash | TPU, else interpreted | skipped by tokamax's kernel, computed by JAX's own |
    | cudnn | GPU of NVIDIA, bfloat16 and float16 | computed |
    | cudnn_packed | the same, from Hopper on, with `segment_offsets` | skipped |
    | tokamax | the same, if it is installed | skipped forward, computed backward |

    The last two are compared with dense attention before their first use. If they cannot be used, a
    warning says why, and what takes their place.

    Args:
        segment_ids: int [B, L], of queries.
        kv_segment_ids: int [B, S], of keys, for cross-attention; None: those of the queries.
        positions: int [B, L], ascending in each segment; needed for causal order and windows under
            a mesh with an axis `context`, else not used.
        visible_until: int [B, L], for each column the first later column that no longer sees it,
            0 on padding; None: the end of its segment.
        segment_offsets: int32 [B, M+1], for "cudnn_packed": for each segment of queries its first
            column, then the end of the last. M is static, and at least the most segments in a row.
        kv_segment_offsets: those of keys, for cross-attention.
        causal: whether a query sees no later key.
        window: at least 1; None: the whole segment.
        implementation: one of `IMPLEMENTATIONS`; "auto" chooses.
        dtype: of queries, for "auto".
        head_width: K, for "auto".

    Raises:
        ValueError: if shapes or options do not fit, or the implementation does not exist.
    """
    itself, grouped = kv_segment_ids is None, visible_until is not None
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    shapes = segment_ids.shape, kv_segment_ids.shape
    _check_options(itself, grouped, causal, window, implementation)
    any_order = splits_length() and not grouped
    positions = positions if itself else None
    if any_order and positions is None and (causal or window is not None):
        raise ValueError(
            "the mesh splits rows over 'context', so causal order and windows compare positions; "
            "give positions."
        )
    lengths = shapes[0][1], shapes[1][1]
    if itself:
        kv_segment_offsets = segment_offsets
    automatic = choose(jax.default_backend(), jnp.dtype(dtype), *lengths, head_width=head_width)
    flaw = ""
    if implementation in SKIPPING:
        offsets = segment_offsets is not None and kv_segment_offsets is not None
        flaw = _find_flaw_here(implementation, offsets, grouped, causal, window)
    if implementation == "auto" or flaw:
        choice = _under_context(automatic) if splits_length() else automatic
        _say(choice, f"{implementation!r} is not used: {flaw}" if flaw else "")
        implementation = choice.implementation

    # Sorted by segment and position, the keys that a block sees are in few blocks.
    minor = jnp.zeros_like(kv_segment_ids) if positions is None else positions
    order = jnp.lexsort((minor, kv_segment_ids)) if any_order else None
    ids = segment_ids, kv_segment_ids
    if implementation == "cudnn_packed":
        attend = _packed(ids, (segment_offsets, kv_segment_offsets), causal, window)
    elif implementation == "tokamax":
        attend = _tokamax(ids, order, causal, window)
    elif implementation == "splash" and not grouped and not splits_length():
        attend = _splash(ids, causal, window)
    else:
        if causal and not any_order:
            until = segment_ends(segment_ids) if visible_until is None else visible_until
            visible = causal_until(until, window)
        else:
            visible = by_segment(
                segment_ids, kv_segment_ids, positions, causal=causal, window=window
            )
        if implementation == "dense":
            attend = partial(dense_attention, seen_BLS=visible.mask())
        elif implementation == "cudnn":
            attend = _by_visibility(partial(_cudnn, causal=causal and not splits_length()), visible)
        elif implementation == "splash":
            attend = _by_visibility(splash_masked, visible, order)
        else:
            attend = _blocked(visible, order, adjoining=any_order or not causal)
    return _checked(attend, *shapes)


def _checked(attend: Attend, q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> Attend:
    """Return `attend` with arguments of these shapes, and as many key heads as devices need."""

    def checked(q: Array, k: Array, v: Array) -> Array:
        _check_shapes(q, k, v, q_shape, kv_shape)
        return attend(q, *(repeat_heads(x, q.shape[2]) for x in (k, v)))

    return checked


def _blocked(visible: Visibility, order_BS: Array | None, *, adjoining: bool) -> Attend:
    """Return `attend` in blocks, with keys in that order; None: as they are."""
    places_BL, since_BS, until_BS = visible
    if order_BS is not None:
        since_BS, until_BS = (_take(x, order_BS) for x in (since_BS, until_BS))
    needed = per_device(
        lambda *ranges: needed_blocks(Visibility(*ranges), adjoining=adjoining),
        (places_BL,),
        (since_BS, until_BS),
    )

    def each(q, places, blocks, counts, k, v, since, until, *order):
        if order:
            k, v = (_take(x, order[0]) for x in (k, v))
        return blocked_attention(q, k, v, Visibility(places, since, until), (blocks, counts))

    ranges = (since_BS, until_BS) if order_BS is None else (since_BS, until_BS, order_BS)
    return lambda q, k, v: per_device(each, (q, places_BL, *needed), (k, v, *ranges))


def _by_visibility(
    attend: Callable[..., Array], visible: Visibility, order_BS: Array | None = None
) -> Attend:
    """Return `attend` of queries, keys, values and a visibility, for what each device holds.

    Keys are given in that order; None: as they are.
    """
    places_BL, *ranges = visible

    def each(q, places, k, v, since, until, *order):
        if order:
            k, v, since, until = (_take(x, order[0]) for x in (k, v, since, until))
        return attend(q, k, v, Visibility(places, since, until))

    order = () if order_BS is None else (order_BS,)
    return lambda q, k, v: per_device(each, (q, places_BL), (k, v, *ranges, *order))


def _splash(ids: tuple[Array, Array], causal: bool, window: int | None) -> Attend:
    """Return `attend` by kernels for TPUs, for whole rows."""

    def each(q, q_ids, k, v, kv_ids):
        return splash_attention(q, k, v, q_ids, kv_ids, causal, window)

    return lambda q, k, v: per_device(each, (q, ids[0]), (k, v, ids[1]))


def _cudnn(q: Array, k: Array, v: Array, visible: Visibility, *, causal: bool) -> Array:
    """Return the result of cuDNN's kernel for GPUs of NVIDIA, which never stores the scores.

    `causal` says that queries and keys are the same columns, in order.
    """
    return dense_attention(q, k, v, seen(*visible), is_causal=causal, implementation="cudnn")


def _packed(ids, offsets, causal, window) -> Attend:
    """Return `attend` by cuDNN's packed layout."""

    def each(q, q_ids, k, v, kv_ids, q_offsets, kv_offsets):
        return packed_attention(q, k, v, q_ids, kv_ids, q_offsets, kv_offsets, causal, window)

    return lambda q, k, v: per_device(each, (q, ids[0]), (k, v, ids[1], *offsets))


def _tokamax(ids, order_BS, causal, window) -> Attend:
    """Return `attend` by tokamax's kernels for GPUs, with keys in that order; None: as they are."""
    ranges = key_ranges(ids[0], ids[1], order_BS, causal=causal, window=window)

    def each(q, first, stop, k, v, *order):
        if order:
            k, v = (_take(x, order[0]) for x in (k, v))
        return tokamax_attention(q, k, v, first, stop, causal and order_BS is None)

    order = () if order_BS is None else (order_BS,)
    return lambda q, k, v: per_device(each, (q, *ranges), (k, v, *order))


def _take(x_BS: Array, order_BS: Array) -> Array:
    """Return [B, S, …] with the columns in that order."""
    return jnp.take_along_axis(
        x_BS, order_BS.reshape(*order_BS.shape, *[1] * (x_BS.ndim - 2)), axis=1
    )


class Choice(NamedTuple):
    """An implementation, and what is said of it."""

    implementation: str
    why: str  # the end of a sentence
    faster: str = ""  # what may be faster here, a sentence


def choose(
    platform: str, dtype: jnp.dtype, q_length: int, kv_length: int, *, head_width: int = 64
) -> Choice:
    """Return the implementation that "auto" chooses, and why.

    All implementations respect segments; the choice is about speed and memory, as measured.

    >>> choose("cpu", jnp.dtype("float32"), 4096, 4096)[:2]
    ('blocked', 'on CPU it was faster than dense at every length from 64')

    Args:
        platform: "cpu", "gpu" or "tpu".
        dtype: of the queries.
        q_length: positions in a row of queries.
        kv_length: positions in a row of keys.
        head_width: numbers in a query.
    """
    if platform == "cpu":
        return Choice("blocked", "on CPU it was faster than dense at every length from 64")
    if platform == "gpu" and _fits_cudnn(dtype, q_length, kv_length, head_width):
        why = "on GPUs of NVIDIA its kernel was the fastest up to rows of 16,384"
        return Choice("cudnn", why, UNMEASURED)
    if q_length * kv_length <= 512 * 512:
        return Choice("dense", "rows are so short that masking all scores in one step is cheap")
    if platform == "tpu" and dtype != jnp.float16:
        if splash_available():
            return Choice("splash", "on TPU its kernel skips other segments")
        why = "on TPU its kernel, here JAX's own, is faster than plain loops"
        return Choice("splash", why, "tokamax 0.0.17 (Python 3.12) also skips other segments")
    faster = UNMEASURED if platform == "gpu" else ""
    return Choice("blocked", "it needs no L×S array and skips other segments", faster)


def skips_segments(
    implementation: str, dtype: jnp.dtype, length: int, *, head_width: int, grouped: bool = False
) -> bool:
    """Return whether attention in rows of this length computes no scores between segments.

    So rows of long segments take longer. Options are those of `make_attention`; `grouped` says
    whether rows have groups. The mesh is the present one.
    """
    if implementation in SKIPPING and not _find_flaw_here(
        implementation, offsets=True, grouped=grouped, causal=True, window=None
    ):
        return implementation == "cudnn_packed"  # tokamax computes them in the backward pass
    if implementation in ("auto", *SKIPPING):
        platform = jax.default_backend()
        choice = choose(platform, jnp.dtype(dtype), length, length, head_width=head_width)
        implementation = (_under_context(choice) if splits_length() else choice).implementation
    in_kernel = splash_available() and not grouped and not splits_length()
    return implementation == "blocked" or (implementation == "splash" and in_kernel)


UNMEASURED = (
    "from Hopper on, 'cudnn_packed' skips other segments, 'tokamax' in the forward pass, and they "
    "may be faster; benchmarks/accelerator.py measures them"
)


def _under_context(automatic: Choice) -> Choice:
    """The choice of "auto" for rows that are divided over devices, where no kernel is measured."""
    why = f"rows are divided over {count_length_parts()} devices"
    kernel = automatic.implementation
    if kernel == "splash":
        return Choice("blocked", why, "'splash' keeps a kernel, but is not measured there")
    if kernel == "cudnn":
        faster = "'tokamax' (Python 3.12) and 'cudnn' keep a kernel, but are not measured there"
        return Choice("blocked", why, faster)
    return automatic


def _find_flaw_here(
    name: str, offsets: bool, grouped: bool, causal: bool, window: int | None
) -> str:
    """Return why a kernel that skips segments cannot be used for these options; "" if it can."""
    if grouped:
        return "rows have groups, which need a mask"
    if name == "cudnn_packed":
        if splits_length():
            return "it needs whole rows, and the mesh divides them over 'context'"
        if not offsets:
            return (
                "it needs segment_offsets, a field of batches on request: "
                "features=['inputs_segment_offsets']"
            )
        if window is not None and not causal:
            return "it has no window that sees both ways"
    return find_flaw(name)


def _fits_cudnn(dtype: jnp.dtype, q_length: int, kv_length: int, head_width: int) -> bool:
    """Return whether cuDNN has a kernel for this, forward and backward, on the first device."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "")  # "9.0"; AMD's: "gfx942"
    return (
        capability[:1].isdigit()
        and float(capability) >= 8
        and dtype in (jnp.bfloat16, jnp.float16)
        and head_width % 8 == 0
        and head_width <= 128
        and q_length % 2 == 0
        and kv_length % 2 == 0
        and max(q_length, kv_length) <= LONGEST_CUDNN
    )


@cache
def _say(choice: Choice, flaw: str) -> None:
    """Log a choice once; as a warning, if it takes the place of what was asked for."""
    faster = f"; {choice.faster}" if choice.faster and not flaw else ""
    logging.getLogger(__name__).log(
        logging.WARNING if flaw else logging.INFO,
        "attention: %s%r, because %s%s.",
        f"{flaw}; instead " if flaw else "",
        *choice[:2],
        faster,
    )


def dense_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    seen_BLS: Array,
    *,
    is_causal: bool = False,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> Array:
    """Return the result of `attend` by masking all L×S scores: simple, and never cheap in XLA.

    With `is_causal`, which the mask includes, a kernel may leave out the later keys.

    If everything in a row is masked, softmax gives the mean of all values, and its gradient would
    reach the keys; so zeros replace such rows, which cuts both. XLA on CPU lacks the float16
    product that JAX asks for here, so float32 takes its place.
    """
    dtype = q_BLNK.dtype
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        q_BLNK, k_BSGK, v_BSGK = (x.astype(jnp.float32) for x in (q_BLNK, k_BSGK, v_BSGK))
    out_BLNK = jax.nn.dot_product_attention(
        q_BLNK,
        k_BSGK,
        v_BSGK,
        mask=seen_BLS[:, None],
        is_causal=is_causal,
        implementation=implementation,
    )
    return jnp.where(seen_BLS.any(axis=-1)[:, :, None, None], out_BLNK, 0).astype(dtype)


def _check_options(itself, grouped, causal, window, implementation):
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; use one of {', '.join(IMPLEMENTATIONS)}."
        )
    if not itself and (causal or window is not None):
        raise ValueError(
            "causal order and windows compare columns of the same row, but kv_segment_ids are "
            "those of another row; for cross-attention, use causal=False and window=None."
        )
    if grouped and (not causal or window is not None):
        raise ValueError(
            f"causal is {causal} and window is {window}, but rows with visible_until are causal "
            "and have no window; use causal=True and window=None, or batches without groups."
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, for the position itself.")


def _check_shapes(q, k, v, ids_shape, kv_ids_shape):
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}; they must be "
            f"[batch, length, heads, width], with k and v equal."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has shape {q.shape} and k has shape {k.shape}; batch and width must agree, and "
            f"the number of query heads must be a multiple of the number of key heads."
        )
    if q.shape[:2] != ids_shape or k.shape[:2] != kv_ids_shape:
        raise ValueError(
            f"segment ids have shapes {ids_shape} and {kv_ids_shape}; q and k need "
            f"{q.shape[:2]} and {k.shape[:2]}; for cross-attention, pass kv_segment_ids too."
        )
