"""Attention on GPUs of NVIDIA that skips other segments: cuDNN's packed layout, and tokamax.

Both are reached by private paths of JAX and tokamax, whose arguments may change. So before its
first use, each is compared with dense attention on the device, and `find_flaw` says what is wrong.

Shape letters are explained in `models/__init__.py`. In addition, M is the most segments in a row.
"""

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.visibility import by_segment, segment_ends

SKIPPING = ("cudnn_packed", "tokamax")
HOPPER = 9.0  # the first compute capability with these kernels
TOKAMAX = (0, 0, 17)
CLOSE = 0.03  # of the largest number, for bfloat16


def packed_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    q_ids_BL: Array,
    kv_ids_BS: Array,
    q_offsets: Array,
    kv_offsets: Array,
    causal: bool,
    window: int | None,
) -> Array:
    """Return the result of `attend` of `make_attention`, by cuDNN's packed layout.

    cuDNN computes the scores of each segment alone. It writes nothing for a position outside of all
    segments, so zeros replace these, also in gradients. JAX makes one list of the offsets of all
    rows that are not negative, one of the sizes, and cuDNN pairs them; so unused places, those of a
    segment that one side lacks, and the end after the last segment are −1. Keys are repeated for
    the query heads that share them, since JAX before July 2026 found wrong ones
    (jax-ml/jax#39521). One place for a segment would mean rows without segments, so there are at
    least two.

    The statistics of the softmax take 4 bytes for each row, place, query head and column.

    Args:
        q_BLNK: queries, with keys and values in bfloat16 or float16.
        k_BSGK: keys.
        v_BSGK: values.
        q_ids_BL: int [B, L], of queries.
        kv_ids_BS: int [B, S], of keys.
        q_offsets: int32 [B, M+1], for each segment of queries its first column, then the end.
        kv_offsets: int32 [B, M+1], of keys.
        causal: as for `make_attention`.
        window: as for `make_attention`; only with `causal`.

    Raises:
        ValueError: queries or keys have 2³¹ elements or more on a device.
    """
    if max(q_ids_BL.size, kv_ids_BS.size) * q_BLNK[0, 0].size >= 1 << 31:
        raise ValueError(
            f"queries have the shape {q_BLNK.shape} on a device, and cuDNN's offsets reach fewer "
            "than 2,147,483,648 elements; use fewer rows on each device, or another attention, "
            "such as 'tokamax'"
        )
    fused = _fused_attention()
    q_offsets, kv_offsets = (
        jnp.pad(x, ((0, 0), (0, max(0, 3 - x.shape[1]))), mode="edge")
        for x in (q_offsets, kv_offsets)
    )
    q_sizes, kv_sizes = _sizes(q_offsets, q_ids_BL), _sizes(kv_offsets, kv_ids_BS)
    both = (q_sizes > 0) & (kv_sizes > 0)
    q_real_BL, kv_real_BS = (
        jnp.take_along_axis(both, jnp.maximum(ids - 1, 0), axis=1) & (ids > 0)
        for ids in (q_ids_BL, kv_ids_BS)
    )
    heads = q_BLNK.shape[2] // k_BSGK.shape[2]
    k_BSNK, v_BSNK = (jnp.repeat(_keep(kv_real_BS, x), heads, axis=2) for x in (k_BSGK, v_BSGK))
    kinds = fused.MaskType
    out_BLNK = fused.dot_product_attention(
        _keep(q_real_BL, q_BLNK),
        k_BSNK,
        v_BSNK,
        q_seqlen=jnp.where(both, q_sizes, -1),
        kv_seqlen=jnp.where(both, kv_sizes, -1),
        q_offsets=_begins(q_offsets, both),
        kv_offsets=_begins(kv_offsets, both),
        scale=q_BLNK.shape[-1] ** -0.5,
        mask_type=kinds.PADDING_CAUSAL if causal else kinds.PADDING,
        sliding_window_length=window,
    )
    return _keep(q_real_BL, out_BLNK)


def tokamax_attention(
    q_BLNK: Array, k_BSGK: Array, v_BSGK: Array, first_BL: Array, stop_BL: Array, causal: bool
) -> Array:
    """Return the result of `attend`, where a query sees the keys first ≤ column < stop.

    With `causal`, queries and keys are the same columns in order, and the last key that a query
    sees is its own column. A block of queries visits the blocks of keys from the least first to the
    largest stop. The backward passes of 0.0.17, for Hopper and Blackwell, mask by these alone, and
    leave out blocks only if they are told that order is causal.

    Not on a GPU, tokamax computes this by XLA. Queries that see nothing see a key nearby, and zeros
    replace the result, which also cuts the gradient.
    """
    from tokamax._src.ops.attention import api, base

    sees_BL = first_BL < stop_BL
    if causal:
        first_BL = jnp.where(sees_BL, first_BL, jnp.arange(first_BL.shape[1]))
        mask = base.Mask(k_start=first_BL[:, None], is_causal=True)
    else:
        last_B1 = jnp.minimum(first_BL.max(axis=1, keepdims=True), k_BSGK.shape[1] - 1)
        first_BL = jnp.where(sees_BL, first_BL, last_B1)
        stop_BL = jnp.where(sees_BL, stop_BL, last_B1 + 1)
        mask = base.Mask(k_start=first_BL[:, None], k_end=stop_BL[:, None])
    names, dtype = ["mosaic_gpu", "triton"], q_BLNK.dtype
    if jax.default_backend() != "gpu":  # where XLA lacks products of float16
        names = ["xla"]
        q_BLNK, k_BSGK, v_BSGK = (x.astype(jnp.float32) for x in (q_BLNK, k_BSGK, v_BSGK))
    names = [name for name in names if name in api.IMPLEMENTATIONS]
    for name in names:
        try:
            out_BLNK = api.IMPLEMENTATIONS[name](q_BLNK, k_BSGK, v_BSGK, mask=mask)
            return _keep(sees_BL, out_BLNK).astype(dtype)
        except NotImplementedError:  # of these shapes, or on this device
            if name == names[-1]:
                raise
    raise NotImplementedError(
        f"tokamax has none of the kernels for GPUs, only {[*api.IMPLEMENTATIONS]}"
    )


def key_ranges(
    q_ids_BL: Array,
    kv_ids_BS: Array,
    order_BS: Array | None,
    *,
    causal: bool,
    window: int | None,
) -> tuple[Array, Array]:
    """Return, for each query, the first column that it sees, and the first later one: int32 [B, L].

    They are equal for a query that sees nothing. For ids [1, 1, 2, 0], causal, they are
    [0, 0, 2, ·] and [1, 2, 3, ·].

    `order_BS` is that in which keys are placed, sorted by segment and position; None: columns are
    in order, and segments contiguous.
    """
    first_BL, stop_BL = by_segment(kv_ids_BS, q_ids_BL)[1:]  # places of sorted keys
    if order_BS is None:
        size_BL = stop_BL - first_BL
        by_id_BS = jnp.argsort(kv_ids_BS, axis=1, stable=True)
        last = kv_ids_BS.shape[1] - 1
        first_BL = jnp.take_along_axis(by_id_BS, jnp.minimum(first_BL, last), axis=1)
        stop_BL = first_BL + size_BL
        own_BL = jnp.broadcast_to(jnp.arange(q_ids_BL.shape[1]), q_ids_BL.shape)
    else:
        own_BL = jnp.argsort(order_BS, axis=1)
    if window is not None:
        first_BL = jnp.maximum(first_BL, own_BL - window + 1)
        stop_BL = jnp.minimum(stop_BL, own_BL + window)
    if causal:
        stop_BL = jnp.minimum(stop_BL, own_BL + 1)
    stop_BL = jnp.where(q_ids_BL > 0, jnp.maximum(first_BL, stop_BL), first_BL)
    return first_BL.astype(jnp.int32), stop_BL.astype(jnp.int32)


@cache
def find_flaw(name: str) -> str:
    """Return why an implementation cannot be used on this machine; "" if it can.

    The comparison runs in a thread of its own, where no mesh is set and nothing is traced.
    """
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "")  # "9.0"; AMD's: "gfx942"
    if jax.default_backend() != "gpu" or not capability[:1].isdigit() or float(capability) < HOPPER:
        return f"it needs a GPU of NVIDIA from Hopper on, and this is {device.device_kind}"
    if flaw := _find_flaw_of_version(name):
        return flaw
    with ThreadPoolExecutor(1) as pool:
        try:
            error = pool.submit(_compare, name).result()
        except Exception as failure:  # of any kind: the path is private
            return f"it failed: {type(failure).__name__}: {str(failure).splitlines()[0]:.200}"
    return "" if error < CLOSE else f"its results differ from dense attention by {error:.2g}"


def _find_flaw_of_version(name: str) -> str:
    if name == "tokamax":
        if importlib.util.find_spec("tokamax") is None:
            return "tokamax is not installed, which needs Python 3.12: pip install tokamax"
        version = importlib.metadata.version("tokamax")
        numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
        return "" if numbers >= TOKAMAX else f"tokamax {version} is too old; 0.0.17 is needed"
    try:
        taken = inspect.signature(_fused_attention().dot_product_attention).parameters
    except (ImportError, AttributeError, ValueError) as error:
        return f"JAX {jax.__version__} has it elsewhere: {error}"
    wanted = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "sliding_window_length"}
    missing = sorted(wanted - {*taken})
    return f"JAX {jax.__version__} does not take {', '.join(missing)}" if missing else ""


def _compare(name: str) -> float:
    """The largest error of an implementation, forward and backward, of two small packed rows."""
    sizes = [[40, 1, 60, 100, 30], [200, 56]]
    rows = [np.repeat(np.arange(len(each)) + 1, each) for each in sizes]
    ends = [np.cumsum([0, *each]) for each in sizes]
    ids = jnp.stack([jnp.pad(row, (0, 256 - len(row))) for row in rows])
    offsets = jnp.stack([jnp.pad(each, (0, 6 - len(each)), mode="edge") for each in ends])
    ids, offsets = ids.astype(jnp.int32), offsets.astype(jnp.int32)
    mask = (ids[:, :, None] == ids[:, None]) & jnp.tri(256, dtype=bool)

    def by_mask(q: Array, k: Array, v: Array) -> Array:
        out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return _keep(ids > 0, out)

    def skipping(q: Array, k: Array, v: Array) -> Array:
        if name == "tokamax":
            ranges = key_ranges(ids, ids, None, causal=True, window=None)
            return tokamax_attention(q, k, v, *ranges, True)
        return packed_attention(q, k, v, ids, ids, offsets, offsets, True, None)

    def run(attend: Callable[..., Array], *inputs: Array) -> list[np.ndarray]:
        *qkv, cotangent = inputs
        out, pull = jax.vjp(jax.jit(attend), *qkv)
        return [np.asarray(x, np.float32) for x in (out, *pull(cotangent))]

    keys = jax.random.split(jax.random.key(0), 4)
    inputs = [
        jax.random.normal(key, (2, 256, heads, 64), jnp.bfloat16)
        for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    ]
    expected = run(by_mask, *(x.astype(jnp.float32) for x in inputs))
    found = run(skipping, *inputs)
    errors = [abs(a - b).max() / abs(b).max() for a, b in zip(found, expected, strict=True)]
    return float(max(errors)) if np.isfinite(errors).all() else float("inf")


def _fused_attention() -> Any:
    """JAX's module of cuDNN's attention."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _sizes(offsets: Array, ids: Array) -> Array:
    """Return int32 [B, M], the positions of each segment, without padding after it."""
    begins, steps = offsets[:, :-1], jnp.diff(offsets, axis=1)
    at = jnp.minimum(begins, ids.shape[1] - 1)
    ends = jnp.take_along_axis(segment_ends(ids), at, axis=1)
    return jnp.where(steps > 0, ends - begins, 0).astype(jnp.int32)


def _begins(offsets: Array, used: Array) -> Array:
    """Return offsets [B, M+1] with −1 where a place is not used, and at the end."""
    return jnp.pad(jnp.where(used, offsets[:, :-1], -1), ((0, 0), (0, 1)), constant_values=-1)


def _keep(where: Array, x: Array) -> Array:
    """Return x [B, L, N, K] with zeros, also as gradients, where `where` [B, L] is False."""
    return jnp.where(where[:, :, None, None], x, 0)
