"""One of several processes: does what its JSON argument asks, and answers in JSON."""

import hashlib
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import pipeline
import pipeline.scoring.scores
from pipeline.errors import Late
from pipeline.loading.exchange import Exchange
from pipeline.steps import Compiled, hosts, make_train_step
from pipeline.text.sources import TextFiles
from pipeline.text.tokenizers import Bytes
from tests.meshes import mesh_of


def layout(asked):
    mesh = mesh_of(order=asked.get("order"), **asked["mesh"])
    if "dynamic" in asked:
        return mesh, pipeline.DynamicContext(mesh)
    return mesh, NamedSharding(mesh, PartitionSpec(*asked["spec"])) if "spec" in asked else mesh


def same(batch):  # one function, so that each shape is compiled once
    return batch


def hash_of(batch, mesh):
    """A hash of every array of a global batch, gathered on every process."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    whole = jax.jit(same, out_shardings=everywhere)(batch)
    sha = hashlib.sha256()
    for name, array in sorted(whole.items()):
        values = np.asarray(array.addressable_data(0))
        sha.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return sha.hexdigest()


def batches(asked):
    mesh, sharding = layout(asked)
    buckets = [pipeline.Bucket(*b) for b in asked.get("buckets", [[8, 16], [4, 64]])]
    answer = {"hashes": [], "states": []}
    options = {"num_epochs": 2, "sharding": sharding, "overflow": asked.get("overflow", "split")}
    with pipeline.load(asked["corpus"], buckets=buckets, **options) as loader:
        answer["steps_per_epoch"] = loader.plan.num_batches()
        for batch in loader:
            answer["hashes"].append(hash_of(batch, mesh))
            answer["states"].append(loader.get_state())
    return answer


def train(asked):
    """The losses and parameters of steps of linear attention over rows that processes share."""
    mesh, sharding = layout(asked)
    buckets = [pipeline.Bucket(*b) for b in asked["buckets"]]

    def loss(params, batch):
        x = params[batch["inputs"]]
        sees = pipeline.attention_mask(batch)
        x = x + jnp.einsum("bqk,bkd->bqd", sees.astype(x.dtype), x) / 9
        nll = -jnp.take_along_axis(
            jax.nn.log_softmax(x @ params.T), batch["targets"][..., None], axis=-1
        )
        return (nll[..., 0] * batch["loss_weights"]).sum(), batch["loss_weights"].sum()

    init, step = make_train_step(loss, optax.sgd(0.5), sharding=sharding)
    table = np.random.default_rng(0).normal(size=(99, 8)).astype(np.float32) / 9
    whole = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), whole), init(table))
    answer = {"losses": [], "rows": [], "processes": []}
    options = {"num_epochs": 1, "sharding": sharding, "context_order": asked["context_order"]}
    with pipeline.load(asked["corpus"], buckets=buckets, **options) as loader:
        program = Compiled(step, state, loader.specs, donate=True, out_shardings=whole)
        for batch in loader:
            state, values = program(state, batch)
            answer["losses"].append(float(values["loss"]))
            (devices,) = {
                tuple(shard.index[0].indices(batch["inputs"].shape[0]))
                for shard in batch["inputs"].addressable_shards
            }
            answer["rows"].append([loader.planned.bucket.rows, devices[1] - devices[0]])
    answer["sum"] = float(jnp.abs(state["params"]).sum())
    return answer


def exchange(asked):
    """Three rounds with all processes, and between them, with those of even or odd numbers."""
    index, count = jax.process_index(), jax.process_count()
    every = Exchange(seconds=asked.get("seconds", 60.0))
    alike = Exchange(range(index % 2, count, 2))
    answer = {"all": [], "alike": [], "late": []}
    print("BEGUN", flush=True)
    time.sleep(asked.get("pause", 0))
    for number in range(3):
        while len(answer["all"]) == number:
            try:
                answer["all"].append(every.gather((index, number)))
            except Late as error:
                answer["late"].append(str(error))
        answer["alike"].append(alike.gather(["alike", index, number]))
    return answer


def agree(asked):
    return refusal(hosts.require_agreement, {"plan": asked["plan"]})


def share(asked):
    return refusal(hosts.require_shared, epath.Path(asked["directory"]))


def refusal(check, value):
    """What a check says that refuses a value on every process, or None."""
    try:
        return check(value)
    except (ValueError, OSError, RuntimeError) as error:
        return str(error)


class Counting(Bytes):
    """Notes whether it was asked for anything."""

    used = False

    def encode_batch(self, texts):
        Counting.used = True
        return super().encode_batch(texts)


def prepare(asked):
    def work():
        source = TextFiles(__file__)
        return pipeline.prepare(source, Counting(), asked["directory"], num_workers=0)

    Counting.used = False
    corpus = hosts.main_process_first("preparing", work)
    hosts.require_agreement({"corpus": corpus.fingerprint})
    return {"fingerprint": corpus.fingerprint, "tokenised": Counting.used}


def fail(asked):
    def work():
        raise OSError("the disk is gone")

    return refusal(lambda what: hosts.main_process_first(what, work), "preparing")


def count(asked):
    index, several = jax.process_index(), jax.process_count() > 1
    number = [(1 << 40) + 1, 3.5][index] if several else 0.25
    return {"count": jax.process_count(), "index": index, "largest": hosts.maximum(number)}


def score(asked):
    """Scores a corpus in parts of two steps; each batch takes `seconds` to build."""
    mesh, _ = layout(asked)
    pipeline.scoring.scores.STEPS = 2
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(99, 32)).astype(np.float32) for name in ("in", "out")}
    read = pipeline.Corpus.read

    def slowly(*arguments):
        time.sleep(asked.get("seconds", 0))
        return read(*arguments)

    def step(params, batch):
        hidden = jnp.tanh(params["in"][batch["inputs"]].cumsum(1))
        logits = jax.nn.log_softmax(hidden @ params["out"].T)
        likelihoods = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return {"nll": -likelihoods * batch["loss_weights"]}

    pipeline.Corpus.read = slowly
    print("BEGUN", flush=True)
    scores = pipeline.score(
        asked["corpus"],
        step,
        state=params,
        directory=asked["directory"],
        sharding=mesh,
        buckets=[pipeline.Bucket(8, 16), pipeline.Bucket(4, 32)],
        per="position",
    )
    return len(scores)


def stop(asked):
    """The number of calls until a signal is received, from its beginning."""
    with hosts.StopSignals() as signals:
        print("BEGUN", flush=True)
        for call in range(5_000):
            if signals.received():
                return {"call": call, "again": signals.received(), "reason": signals.reason}
            time.sleep(0.004)
    return None


def several(asked):
    """The answers to the jobs of a list; `differ` has what one process is asked in its place."""
    own = [job | job.get("differ", {}).get(str(asked["index"]), {}) for job in asked["jobs"]]
    return [DO[job["do"]](job) for job in own]


JOBS = batches, exchange, agree, share, prepare, fail, count, score, stop, several
DO = {job.__name__: job for job in JOBS}


def main():
    asked = json.loads(sys.argv[1])
    if asked.get("platform"):
        hosts.connect(None, None, None, wait=20)
    elif asked["count"] > 1:
        hosts.connect(f"127.0.0.1:{asked['port']}", asked["count"], asked["index"], wait=20)
    with hosts.exit_together("host_worker.py"):
        print("ANSWER", json.dumps(DO[asked["do"]](asked)), flush=True)


if __name__ == "__main__":
    main()
