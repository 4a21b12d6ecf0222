"""The sizes and choices that define a Transformer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.attention import IMPLEMENTATIONS

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The configuration of a decoder, an encoder or an encoder–decoder.

    `dtype` is that of the matrix products and the residual stream. Parameters, softmax, norms and
    logits are always float32.

    >>> TransformerConfig(vocab_size=256, num_layers=2, width=64, num_heads=4,
    ...                   num_kv_heads=2, mlp_width=192).head_width
    16

    Raises:
        ValueError: if sizes do not fit together; the message names the field and the fix.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int  # fewer than num_heads: grouped-query attention (Ainslie et al., 2023)
    mlp_width: int
    rope_theta: float = 10_000.0  # positions; raise it along with the length of rows
    window: int | None = None  # positions seen on one side, itself included; None: the segment
    dtype: str = "float32"
    attention: str = "auto"  # an implementation of models.attention
    # Recompute each layer, but not blocked and splash attention, in the backward pass: less memory,
    # more time.
    remat: bool = False
    scan_layers: bool = False  # one compiled layer in a loop: compile time independent of depth

    def __post_init__(self):
        for field in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads",
                      "mlp_width"):  # fmt: skip
            if (getattr(self, field) or 0) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1.")
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width is {self.width} and num_heads is {self.num_heads}; for rotary positions, "
                f"width must be a multiple of {2 * self.num_heads} (twice num_heads)."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}, which "
                f"must divide num_heads; num_kv_heads={self.num_heads} gives each head its own."
            )
        if self.rope_theta <= 0:
            raise ValueError(f"rope_theta is {self.rope_theta}; it must be positive.")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window is {self.window}; it must be at least 1, for the position itself, or "
                f"None for no window."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}.")
        if self.attention not in IMPLEMENTATIONS:
            raise ValueError(
                f"attention is {self.attention!r}; use one of {', '.join(IMPLEMENTATIONS)}."
            )

    @property
    def head_width(self) -> int:
        """Width of one attention head, K."""
        return self.width // self.num_heads

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as JAX knows it; "auto" is float32 on CPUs and bfloat16 elsewhere."""
        auto = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return jnp.dtype(auto if self.dtype == "auto" else self.dtype)
