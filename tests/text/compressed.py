"""Files as compressors write them."""

import gzip

import pyarrow as pa


def compressed(content, suffix):
    """Bytes of a file with such a name."""
    if suffix == ".gz":
        return gzip.compress(content)
    if suffix == ".zst":
        # Two frames, as parallel compressors write them.
        half, codec = len(content) // 2, pa.Codec("zstd")
        frames = (codec.compress(part).to_pybytes() for part in (content[:half], content[half:]))
        return b"".join(frames)
    return content
