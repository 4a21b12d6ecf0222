"""Loaders on the devices of this process: `python -m tests.loading.some_devices`.

Each line of standard input is a JSON call of `run`; standard output gets a line that it returns.
"""

import hashlib
import json
import sys

import jax
import numpy as np

import pipeline
from pipeline import DynamicContext, Examples
from tests.meshes import mesh_of

OPTIONS = {"tokens_per_batch": 8192, "max_length": 512}


def draw():
    """Examples whose fitted shapes differ between 4 and 8 devices."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(4.5, 0.8, 3000), 2, 2000).astype(int)
    return Examples([rng.integers(1, 250, size) for size in sizes])


def digest(batch):
    """A digest of the real positions of a batch, whatever devices hold them."""
    whole = {name: np.asarray(batch[name]) for name in sorted(batch)}
    content = b"".join(name.encode() + value.tobytes() for name, value in whole.items())
    return hashlib.sha256(content).hexdigest()[:16]


def run(*, dynamic=False, steps=3, restored=None, **options):
    """The shapes, the digests of some batches, and the state after them; or the error.

    `restored` is a state for `set_state`; `options` are of `load`, among them `state`.
    """
    mesh = mesh_of(data=jax.device_count())
    sharding = DynamicContext(mesh) if dynamic else mesh
    try:
        with pipeline.load(draw(), sharding=sharding, **options) as loader:
            if restored is not None:
                loader.set_state(restored)
            batches = [digest(next(loader)) for _ in range(steps)]
            shapes = [*map(str, loader.plan.buckets)]
            return {"shapes": shapes, "batches": batches, "state": loader.get_state()}
    except ValueError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
