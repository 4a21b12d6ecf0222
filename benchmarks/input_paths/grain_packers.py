"""Grain's packers."""

import grain
import numpy as np

from benchmarks.input_paths import InputPath, split

BINS = 64


class Grain(InputPath):
    """Grain's packers, over documents that are shifted, and split if they are too long."""

    packages = ("grain",)
    remark = "refused by its handler; this is host 0's state, set by hand"

    def __init__(self, documents, length, packer):
        super().__init__(documents, length)
        self.packer = packer

    def start(self, rows, host, hosts):
        class Split(grain.experimental.FlatMapTransform):
            max_fan_out = 1_000

            def flat_map(_, element):
                return split(element, self.length)

        each = grain.MapDataset.source(self.documents).shuffle(seed=0)[host::hosts]
        each = each.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=16))
        lengths = {"inputs": self.length, "targets": self.length}
        if self.packer == "ConcatThenSplitIterDataset":
            packed = grain.experimental.ConcatThenSplitIterDataset(
                each.map(_shift), length_struct=lengths
            )
        else:
            pieces = each.apply(Split())
            pack = getattr(grain.experimental, self.packer)
            packed = pack(pieces.map(_shift), length_struct=lengths, num_packing_bins=BINS)
        return iter(packed.batch(rows // hosts))

    def convert(self, element):
        real = element["inputs_segment_ids"] > 0
        return {**element, "loss_weights": real.astype(np.float32)}


def _shift(piece: np.ndarray) -> dict[str, np.ndarray]:
    return {"inputs": piece[:-1], "targets": piece[1:]}
