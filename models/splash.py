"""Attention inside segments on TPU, by tokamax's splash kernel, which skips other segments.

The kernel is in tokamax's experimental part, so its import paths may move: 0.0.17 is the release
this was written for, and the first here whose tiles are pruned by segment, forward and backward
(0.0.12, the last for Python 3.11, masks segments but computes every tile).

Shape letters are explained in `models/__init__.py`.
"""

import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
from jax import Array

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
    """Return what `segment_attention` promises. Away from a TPU the kernel is interpreted: slow.

    The kernel wants every query to see a key, and prunes a tile by the smallest and largest id in
    it. So padding, and queries whose segment has no keys, become one more segment, with an id
    above all others, that has at least one key; its outputs are replaced by zeros.

    Raises:
        ImportError: if tokamax is missing or too old.
    """
    if not splash_available():
        raise ImportError(
            "implementation='splash' needs tokamax 0.0.17 or newer (Python 3.12 or newer): "
            "pip install tokamax."
        )
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as kernel,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    L, S, K = q_BLNK.shape[1], k_BSGK.shape[1], q_BLNK.shape[3]
    rest = jnp.maximum(q_ids_BL.max(), kv_ids_BS.max()) + 1
    kv_ids = jnp.where(kv_ids_BS == 0, rest, kv_ids_BS)
    q_ids, lonely_BL = _gather_lonely(q_ids_BL, kv_ids_BS, rest)
    # One key more than there are, unless all queries see themselves: then lonely ones see it.
    extra = 0 if L == S and (causal or window is not None) else 1
    q, q_ids = _pad(q_BLNK * K**-0.5, L), _pad(q_ids, L, rest)
    k, v, kv_ids = _pad(k_BSGK, S + extra), _pad(v_BSGK, S + extra), _pad(kv_ids, S + extra, rest)

    shape = q.shape[1], k.shape[1]
    mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    block_q, block_kv = (512 if size % 512 == 0 else LANES for size in shape)
    config = kernel.SplashConfig(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        interpret=jax.default_backend() != "tpu",
    )
    attention = kernel.make_splash_mha_single_device(mask, config=config)

    def row(q_NLK, k_GSK, v_GSK, q_ids_L, kv_ids_S):
        return attention(q_NLK, k_GSK, v_GSK, segment_ids=kernel.SegmentIds(q_ids_L, kv_ids_S))

    heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
    out_BLNK = jax.vmap(row)(*heads_first, q_ids, kv_ids).swapaxes(1, 2)[:, :L]
    return jnp.where(lonely_BL[:, :, None, None], 0, out_BLNK).astype(q_BLNK.dtype)


def _pad(x, length, value=0):
    """Return x with dimension 1 at the next multiple of LANES from `length` on."""
    missing = length + -length % LANES - x.shape[1]
    widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=value)
