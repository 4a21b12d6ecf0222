"""Pictures: questions about them are learnt, beside the same model blind; and ways to load them."""

import functools
import itertools
import pathlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from PIL import Image

import pipeline
from benchmarks.results import Section
from benchmarks.turns import best_seconds
from configs import vision
from models import TransformerConfig, VisionDecoder, cross_entropy
from pipeline import Batches, Bucket, Decoded, Examples, Feature, Plan

FIELDS = "inputs", "inputs_segment_ids", "inputs_positions"
FIELDS += "patches", "patch_image", "patch_yx", "patch"
COST = {"inputs": 1.0, "patches": 1.0, "images": 0.0}
TOKENS, TRAINED, HELD_OUT = 8_192, 6_000, 400
PICTURES, EPOCHS = 192, 4
SIZES = 256, 1_024  # pixels of the JPEGs that are decoded, the least and the most


def measure(steps: int) -> Section:
    """Trains, with pictures and blind; and measures ways of loading in turns."""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        train = vision.make_corpus(f"0:{TRAINED}", place / "train")
        held_out = vision.make_corpus(f"{TRAINED}:{TRAINED + HELD_OUT}", place / "held out")
        lines = [(name, *each) for name, *each in _rates(train)]
        ahead = _decoding()
        accuracy = {blind: _train(train, held_out, steps, blind) for blind in (False, True)}
    lines.append(("held-out accuracy", f"{accuracy[False]:.3f}", "", ""))
    lines.append(("the same model, blind", f"{accuracy[True]:.3f}", "", ""))
    lines += [(f"decoding ahead, workers: {n}", f"{rate:.2f}", "", "") for n, rate in ahead]
    about = (
        "Examples a second in a training step, over one a row; with the padding of text and "
        f"of patches. Accuracy after {steps} steps on {TRAINED:,} questions. Batches a second of a "
        "loader that decodes JPEGs of 256 to 1,024 pixels, over the same decoding alone."
    )
    return Section("pictures", about, lines, ("", "", "text", "patches"))


def _steps(corpus: Any) -> tuple[Any, Any, Any]:
    """A state, a training step, and a function that counts right answers."""
    config = TransformerConfig(vocab_size=vision.VOCAB_SIZE, **vision.get_config().model)
    size = corpus.features["patches"].size
    graph, params = nnx.split(VisionDecoder(config, size, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(optax.linear_schedule(0, 2e-3, 50))

    def loss(params: Any, batch: Any) -> tuple[Any, Any]:
        logits = nnx.merge(graph, params)(*(batch[name] for name in FIELDS))
        total, weight = cross_entropy(logits, batch["targets"], batch["loss_weights"])
        right = (logits.argmax(axis=-1) == batch["targets"]) * batch["loss_weights"]
        return total / jnp.maximum(weight, 1), right.sum()

    @jax.jit
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, moments = state
        (_, right), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), right

    count = jax.jit(lambda params, batch: loss(params, batch)[1])
    return (params, optimizer.init(params)), step, count


def _blind(batch: Any) -> Any:
    return {**batch, "patches": 0 * batch["patches"]}


def _train(train: Any, held_out: Any, steps: int, blind: bool) -> float:
    """The share of held-out questions that are answered right."""
    state, step, count = _steps(train)
    transform: Any = _blind if blind else None
    options: Any = {"tokens_per_batch": TOKENS // 2, "max_buckets": 1, "attention": "segment"}
    with pipeline.load(train, cost=COST, transform=transform, **options) as loader:
        for batch in itertools.islice(loader, steps):
            state, _ = step(state, batch)
        plan = Plan(held_out, loader.plan.buckets, shuffle=False, overflow="drop")
    batches = Batches(held_out, plan, transform=transform)
    right = sum(float(count(state[0], batch)) for batch in batches)
    return right / sum(float(batch["loss_weights"].sum()) for batch in batches)


def _rates(corpus: Any) -> list[tuple[str, str, str, str]]:
    """Examples a second over one a row, and padding, with patches at hand."""
    longest = corpus.lengths.max(axis=0).astype(int)
    text, patches = (int(-(-n // 64) * 64) for n in longest[:2])
    rows = TOKENS // (text + patches)
    fitted = pipeline.fit_buckets(
        corpus, tokens_per_batch=TOKENS, max_buckets=1, cost=COST, attention="segment"
    )
    # Text is packed into rows of the longest; each of their pictures has room for the largest one.
    mean = round(text / float(corpus.lengths[:, 0].mean()))
    padded = Bucket(max(TOKENS // (text + mean * patches), 1), {
        "inputs": text, "patches": mean * patches, "images": mean
    })  # fmt: skip
    ways = {
        "one a row": (Bucket(rows, {"inputs": text, "patches": patches, "images": 1}), "none", {}),
        "text packed, pictures padded": (padded, "best_fit", {"align": {"patches": patches}}),
        "packed": (fitted[0], "best_fit", {}),
    }
    state, step, _ = _steps(corpus)
    found, work = {}, {}
    for name, (bucket, packing, options) in ways.items():
        plan = Plan(corpus, [bucket], packing=packing, overflow="drop", **options)
        batch = jax.device_put(dict(Batches(corpus, plan)[0]))
        count = float(batch["loss_weights"].sum())
        shares = [float((batch[f"{n}_segment_ids"] == 0).mean()) for n in ("inputs", "patches")]
        found[name] = count, shares
        work[name] = functools.partial(lambda b: jax.block_until_ready(step(state, b)), batch)
        work[name]()  # compiles
    seconds = best_seconds(work)
    rate = {name: count / seconds[name] for name, (count, _) in found.items()}
    return [
        (name, f"{rate[name] / rate['one a row']:.2f}", *(f"{share:.1%}" for share in shares))
        for name, (_, shares) in found.items()
    ]


def _decoding() -> list[tuple[int, float]]:
    """Batches a second of a loader with 1 and 2 workers, over those of decoding alone."""
    rng, contents = np.random.default_rng(0), []
    for _ in range(PICTURES):
        width, height = rng.integers(*SIZES, 2)
        small = rng.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
        contents.append(vision.encode(Image.fromarray(small).resize((width, height))))
    columns: dict[str, list] = {"patch_image": [], "file_bytes": [], "files": contents}
    cut: dict[str, int] = {"patch": 16, "max_patches": 256}
    for content in contents:
        columns["patch_image"].append([0] * int(np.prod(pipeline.patch_grid(content, **cut))))
        columns["file_bytes"].append([len(content)])
    columns["files"] = [np.frombuffer(content, np.uint8) for content in contents]
    names = {name: vision.STORED[name] for name in columns}
    patches = {"patches": Feature("patches", dtype="uint8", shape=(768,))}
    patches["patch_yx"] = vision.DECODED["patch_yx"]
    corpus = Examples(columns, features=names)
    bucket = Bucket(TOKENS // 2_048, {"patches": 2_048, "images": 16})
    decode = functools.partial(pipeline.patchify, **cut)
    view = Decoded(corpus, decode, features=patches)
    found = []
    for workers in (1, 2):

        def load(workers: int = workers, view: Any = view) -> None:
            options: Any = {"buckets": [bucket], "num_epochs": EPOCHS, "num_threads": workers}
            with pipeline.load(view, **options) as loader:
                for batch in loader:
                    jax.block_until_ready(batch)

        def alone(workers: int = workers, decode: Any = decode) -> None:
            with ThreadPoolExecutor(workers) as pool:
                [*pool.map(decode, EPOCHS * contents)]

        seconds = best_seconds({"loader": load, "alone": alone})
        found.append((workers, seconds["alone"] / seconds["loader"]))
    return found
