"""The most that a device can compute, for the share of it that a model uses."""

# bfloat16 matrix products without sparsity, in FLOP/s per device as JAX counts devices. TPUs:
# Google's "TPU versions" pages; GPUs: NVIDIA's data sheets.
PEAKS = {
    "TPU v3": 61.5e12,  # a core, half a chip
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "V100": 125e12,  # float16
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_of(device_kind: str) -> float | None:
    """FLOP/s of a device by its `device_kind`; None for one that is not in the table.

    >>> peak_of("NVIDIA H100 80GB HBM3") == PEAKS["H100"]
    True
    >>> peak_of("cpu") is None
    True
    """
    words = f" {device_kind.replace('-', ' ')} "
    known = [name for name in PEAKS if f" {name} " in words]
    return PEAKS[max(known, key=len)] if known else None
