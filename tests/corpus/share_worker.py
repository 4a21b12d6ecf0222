"""One of several processes that build the rows of their own, each with a cache of its own.

python share_worker.py CORPUS CACHE HOST HOSTS INTO
"""

import json
import pathlib
import sys

import numpy as np

from pipeline import Batches, Bucket, Corpus, Plan

BUCKET, SHARES = Bucket(16, 256), 8


def main(place, cache, host, hosts, into):
    """Writes the ids of an epoch, step after step, and what was fetched."""
    corpus = Corpus.open(place, cache=cache)
    plan = Plan(corpus, [BUCKET], read_shares=SHARES)
    batches = Batches(corpus, plan, process_index=int(host), process_count=int(hosts))
    ids = np.stack([batches[step]["inputs"] for step in range(plan.num_batches())])
    batches.ahead.stop()
    np.save(f"{into}.npy", ids)
    told = {"fingerprint": plan.fingerprint, **batches.ahead.traffic()}
    pathlib.Path(f"{into}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
