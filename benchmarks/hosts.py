"""What a start costs each of very many hosts: simulated, one host of them at a time.

    python -m benchmarks.hosts

A host plans the global batch, sends a hash and receives the least and the greatest of all hashes
(`pipeline.steps.hosts.require_agreement`), and builds its own rows. Only the last depends on
the number of hosts: it shrinks.
"""

import hashlib
import time

import numpy as np

import pipeline
from benchmarks.lengths import sample
from pipeline.loading.collate import collate_side
from pipeline.loading.sharding import slice_of_process

ROWS = 1024 * 4  # of the longest bucket: four for each host, when there are most


class Nothing:
    """A corpus whose tokens cost nothing to read, so that the rest shows."""

    def read(self, examples, starts, lengths, reach, epoch):
        """Zeros for every position."""
        flat = np.zeros(int(reach.sum()), np.int32)
        return {"inputs": flat, "targets": flat.copy()}


def main():
    """Prints a line for each number of hosts."""
    lengths = sample(None)
    buckets = [pipeline.Bucket(ROWS * 512 // length, length) for length in (128, 256, 512)]
    print(f"{'hosts':>8}{'plan ms':>10}{'first batch ms':>16}{'sent B':>9}{'received B':>12}")
    for hosts in (1, 4, 16, 64, 256, 1024):
        begin = time.perf_counter()
        plan = pipeline.Plan(lengths, buckets)
        planned = plan.batch(0)
        planning = time.perf_counter() - begin
        times = []
        for index in sorted({0, hosts // 2, hosts - 1}):
            begin = time.perf_counter()
            block = slice_of_process(planned.bucket.shape, index, hosts)
            collate_side(Nothing(), planned, 0, block)
            times.append(time.perf_counter() - begin)
        sent = hashlib.sha256().digest_size
        print(f"{hosts:>8,}{planning * 1e3:>10.1f}{max(times) * 1e3:>16.2f}{sent:>9}{2 * sent:>12}")


if __name__ == "__main__":
    main()
