"""Attention inside segments on TPU, by splash kernels: tokamax's, or JAX's own.

Tokamax's skips the tiles of other segments. It is in tokamax's experimental part, so its import
paths may move. This was written for 0.0.17, the first release whose tiles are pruned by segment,
forward and backward (0.0.12, the last for Python 3.11, masks segments but computes every tile).
Without it, JAX's own masks segments, and computes all tiles of the row that are not later.

For groups, and for rows that are divided over devices, JAX's own takes a mask for each row.

Shape letters are explained in `models/__init__.py`.
"""

import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as own_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as own_masks

from models.visibility import KEPT, Visibility, by_segment, seen

LANES = 128  # numbers side by side in a TPU register; lengths must be a multiple
OLDEST = (0, 0, 17)


def splash_available() -> bool:
    """Return whether a tokamax is installed whose kernel skips segments."""
    if importlib.util.find_spec("tokamax") is None:
        return False
    version = importlib.metadata.version("tokamax").split(".")[:3]
    return tuple(int(part) for part in version if part.isdigit()) >= OLDEST


def splash_attention(
    q_BLNK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    q_ids_BL: Array,
    kv_ids_BS: Array,
    causal: bool,
    window: int | None,
) -> Array:
    """Return the result of `attend` of `make_attention`. Not on a TPU, the kernel is interpreted.

    The kernel needs every query to see a key, and prunes tiles by their smallest and largest id.
    So padding becomes a segment with an id above all others. Queries that see nothing join it if
    they are compared by place (then they are padding, and see themselves), else the last key's
    segment. Zeros replace their outputs, which also cuts their gradients.

    With `causal` or `window`, queries and keys must have the same ids.
    """
    L, S, K = q_BLNK.shape[1], k_BSGK.shape[1], q_BLNK.shape[3]
    first_BL, stop_BL = by_segment(kv_ids_BS, q_ids_BL)[1:]  # of the keys of a query's segment
    blind_BL = first_BL >= stop_BL
    padding = jnp.maximum(q_ids_BL.max(), kv_ids_BS.max()) + 1
    kv_ids_BS = jnp.where(kv_ids_BS == 0, padding, kv_ids_BS)
    by_place = causal or window is not None
    spare_B1 = jnp.full_like(kv_ids_BS[:, -1:], padding) if by_place else kv_ids_BS[:, -1:]
    q_ids_BL = jnp.where(blind_BL, spare_B1, q_ids_BL)
    q_ids_BL = jnp.concatenate([q_ids_BL, jnp.repeat(spare_B1, -L % LANES, axis=1)], axis=1)
    kv_ids_BS = jnp.pad(kv_ids_BS, ((0, 0), (0, -S % LANES)), constant_values=padding)
    q_BNLK, k_BGSK, v_BGSK = (_heads_first(x) for x in (q_BLNK * K**-0.5, k_BSGK, v_BSGK))

    shape = q_BNLK.shape[1], L + -L % LANES, S + -S % LANES
    attend, kind = _kernel(shape, causal, window)
    out_BNLK = jax.vmap(lambda *row: attend(*row[:3], segment_ids=row[3]))(
        q_BNLK, k_BGSK, v_BGSK, kind(q_ids_BL, kv_ids_BS)
    )
    out_BLNK = out_BNLK.swapaxes(1, 2)[:, :L].astype(q_BLNK.dtype)
    return jnp.where(blind_BL[:, :, None, None], 0, out_BLNK)


def splash_masked(q_BLNK: Array, k_BSGK: Array, v_BSGK: Array, visible: Visibility) -> Array:
    """Return the result of `attend` for any visibility, by JAX's own splash kernel.

    The kernel takes a mask of L×S, and skips the tiles in which nothing is seen. Rows go one after
    the other, and the backward pass makes their masks again, so only the masks of one row are in
    memory: one forward and two backward, with 1 byte for each element as lowered, and 4 in the
    kernel. Not on a TPU, the kernel is interpreted, which is slow.

    Queries that see nothing see the first key, since the kernel needs one, and zeros replace their
    outputs.
    """
    L, S, K = q_BLNK.shape[1], k_BSGK.shape[1], q_BLNK.shape[3]
    q_BNLK, k_BGSK, v_BGSK = (_heads_first(x) for x in (q_BLNK * K**-0.5, k_BSGK, v_BSGK))
    padded = q_BNLK.shape[2], k_BGSK.shape[2]
    sizes = _own_sizes(padded)

    def attend(row):
        *qkv, places_L, since_S, until_S = row
        mask_LS = seen(places_L, since_S, until_S)
        blind_L1 = ~mask_LS.any(axis=1, keepdims=True)
        mask_LS |= blind_L1 & (jnp.arange(S) == 0)
        padding = (0, padded[0] - L), (0, padded[1] - S)
        mask_LS = jnp.pad(mask_LS, padding).at[L:, 0].set(True)
        made = own_kernel.make_splash_mha_single_device(
            mask_LS[None],
            block_sizes=sizes,
            residual_checkpoint_name="splash",
            interpret=jax.default_backend() != "tpu",
        )
        # Called itself, it would ask a traced array whether its mask is one.
        masks = made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info
        out_NLK = own_kernel._splash_attention(*masks, *qkv, **made.kwargs)
        return jnp.where(blind_L1, 0, out_NLK[:, :L])

    saved = jax.checkpoint_policies.save_only_these_names("splash")  # not the mask
    attend_row = jax.checkpoint(attend, policy=saved)
    out_BNLK = jax.lax.map(attend_row, (q_BNLK, k_BGSK, v_BGSK, *visible))
    return out_BNLK.swapaxes(1, 2).astype(q_BLNK.dtype)


def _kernel(shape, causal, window):
    """Return the kernel for a row of `shape` (N, L, S), compiled on a TPU, else interpreted.

    Also return its class of segment ids.
    """
    heads, sides = shape[0], shape[1:]
    options = {"residual_checkpoint_name": KEPT, "interpret": jax.default_backend() != "tpu"}
    if not splash_available():
        one = _mask(own_masks, sides, causal, window)
        made = own_kernel.make_splash_mha_single_device(
            own_masks.MultiHeadMask([one] * heads),
            block_sizes=_own_sizes(sides),
            **options,
        )
        return made, own_kernel.SegmentIds
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as kernel,
    )

    block_q, block_kv = map(_tile, sides)
    config = kernel.SplashConfig(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        **options,
    )
    mask = _mask(kernel.mask_lib, sides, causal, window)
    return kernel.make_splash_mha_single_device(mask, config=config), kernel.SegmentIds


def _own_sizes(shape):
    """Return the tiles of JAX's own kernel, of queries and keys, in all passes."""
    q, kv = map(_tile, shape)
    return own_kernel.BlockSizes(q, kv, kv, q, kv, kv, q, kv)


def _mask(masks, shape, causal, window):
    """Return the mask of a row by columns; both libraries have the same classes."""
    if window is not None:
        return masks.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    return masks.CausalMask(shape) if causal else masks.FullMask(shape)


def _tile(length):
    """Tiles of 512 keep the matrix units busy; of 128 fit every length that is a multiple."""
    return 512 if length % 512 == 0 else LANES


def _heads_first(x_BLNK):
    """Return [B, N, L, K] with L padded to a multiple of LANES."""
    x_BLNK = jnp.pad(x_BLNK, ((0, 0), (0, -x_BLNK.shape[1] % LANES), (0, 0), (0, 0)))
    return x_BLNK.swapaxes(1, 2)
