"""Attention inside segments on TPU, by tokamax's splash kernel, which skips other segments.

The kernel is in tokamax's experimental part, so its import paths may move. This was written for
0.0.17, the first release whose tiles are pruned by segment, forward and backward (0.0.12, the last
for Python 3.11, masks segments but computes every tile).

Shape letters are explained in `models/__init__.py`.
"""

import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
from jax import Array

from models.visibility import KEPT, by_segment, causal_until

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

    Raises:
        ImportError: if tokamax is missing or too old.
    """
    if not splash_available():
        raise ImportError(
            "implementation='splash' needs tokamax 0.0.17 or newer, which needs Python 3.12 or "
            "newer: pip install 'tokamax>=0.0.17'."
        )
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as kernel,
    )

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

    attend = _kernel(kernel, (L + -L % LANES, S + -S % LANES), causal, window)
    ids = kernel.SegmentIds(q_ids_BL, kv_ids_BS)
    out_BNLK = jax.vmap(lambda *row: attend(*row[:3], segment_ids=row[3]))(
        q_BNLK, k_BGSK, v_BGSK, ids
    )
    out_BLNK = out_BNLK.swapaxes(1, 2)[:, :L].astype(q_BLNK.dtype)
    return jnp.where(blind_BL[:, :, None, None], 0, out_BLNK)


def splash_until(q_BLNK: Array, k_BLGK: Array, v_BLGK: Array, until_BL: Array) -> Array:
    """Return the result of `attend` for rows with groups, by JAX's own splash kernel.

    The kernel takes a mask of L×L, and skips the tiles in which nothing is seen. Rows go one after
    the other, and the backward pass makes their masks again, so only the masks of one row are in
    memory: one forward and two backward, with 1 byte for each element as lowered, and 4 in the
    kernel. Not on a TPU, the kernel is interpreted, which is slow.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    L, K = q_BLNK.shape[1], q_BLNK.shape[3]
    padding_BL = until_BL == 0
    q_BNLK, k_BGLK, v_BGLK = (_heads_first(x) for x in (q_BLNK * K**-0.5, k_BLGK, v_BLGK))
    padded = q_BNLK.shape[2]
    until_BL = jnp.pad(until_BL, ((0, 0), (0, padded - L)))
    until_BL = jnp.where(until_BL == 0, jnp.arange(padded) + 1, until_BL)  # none sees nothing
    sizes = kernel.BlockSizes(*[_tile(padded)] * 8)  # of queries and keys, in all passes

    def attend(row):
        *qkv, until_L = row
        mask_1LL = causal_until(until_L[None]).mask()
        made = kernel.make_splash_mha_single_device(
            mask_1LL,
            block_sizes=sizes,
            residual_checkpoint_name="splash",
            interpret=jax.default_backend() != "tpu",
        )
        # Called itself, it would ask a traced array whether its mask is one.
        masks = made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info
        return kernel._splash_attention(*masks, *qkv, **made.kwargs)

    saved = jax.checkpoint_policies.save_only_these_names("splash")  # not the mask
    attend_row = jax.checkpoint(attend, policy=saved)
    out_BNLK = jax.lax.map(attend_row, (q_BNLK, k_BGLK, v_BGLK, until_BL))
    out_BLNK = out_BNLK.swapaxes(1, 2)[:, :L].astype(q_BLNK.dtype)
    return jnp.where(padding_BL[:, :, None, None], 0, out_BLNK)


def _kernel(kernel, shape, causal, window):
    """Return the kernel for one row of `shape` (L, S), compiled on a TPU, else interpreted."""
    masks = kernel.mask_lib
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    else:
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    block_q, block_kv = map(_tile, shape)
    config = kernel.SplashConfig(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        residual_checkpoint_name=KEPT,
        interpret=jax.default_backend() != "tpu",
    )
    return kernel.make_splash_mha_single_device(mask, config=config)


def _tile(length):
    """Tiles of 512 keep the matrix units busy; of 128 fit every length that is a multiple."""
    return 512 if length % 512 == 0 else LANES


def _heads_first(x_BLNK):
    """Return [B, N, L, K] with L padded to a multiple of LANES."""
    x_BLNK = jnp.pad(x_BLNK, ((0, 0), (0, -x_BLNK.shape[1] % LANES), (0, 0), (0, 0)))
    return x_BLNK.swapaxes(1, 2)
