"""Pictures of any size, packed as in NaFlex: a classifier in Flax NNX, fed by Lockstep.

    pip install 'lockstep-pipeline[images]' flax optax
    python examples/images.py --folder=pictures

`pictures.jsonl` names the files and says what they show; without it, pictures are drawn. They are
decoded when a batch is built. Comments that begin with "Lockstep:" say what the line below does.
"""

import argparse
import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from PIL import Image, ImageDraw

import pipeline
from pipeline import Feature

WIDTH, PATCH = 64, 16
SHAPES = "circle", "square", "triangle"
decode = functools.partial(pipeline.patchify, patch=PATCH, max_patches=64)


def draw_pictures(folder, count):
    """Writes JPEGs of 32 to 512 pixels, and a JSON line for each, with its file and its shape."""
    rng, lines = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        width, height = np.exp(rng.uniform(np.log(32), np.log(512), 2)).astype(int)
        picture = Image.new("RGB", (width, height), tuple(rng.integers(0, 80, 3)))
        pen, fill = ImageDraw.Draw(picture), tuple(rng.integers(150, 255, 3))
        box = (width / 8, height / 8, width * 7 / 8, height * 7 / 8)
        shape = SHAPES[rng.integers(3)]
        if shape == "triangle":
            pen.polygon([(box[0], box[3]), (box[2], box[3]), (width / 2, box[1])], fill=fill)
        else:
            (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=fill)
        picture.save(folder / f"{number}.jpg")
        lines.append(json.dumps({"file": f"{number}.jpg", "shape": shape}) + "\n")
    (folder / "pictures.jsonl").write_text("".join(lines))


def make_corpus(folder):
    """The pictures as a corpus of their bytes, with the sizes that their headers say."""
    names = "patch_image", "file_bytes", "label", "files"
    columns: dict[str, list] = {name: [] for name in names}
    for line in (folder / "pictures.jsonl").read_text().splitlines():
        record = json.loads(line)
        content = (folder / record["file"]).read_bytes()
        # Lockstep: reads the header alone.
        rows, across = pipeline.patch_grid(content, **decode.keywords)
        columns["patch_image"].append(np.zeros(rows * across, int))
        columns["file_bytes"].append([len(content)])
        columns["label"].append([SHAPES.index(record["shape"])])
        columns["files"].append(np.frombuffer(content, np.uint8))
    features = {
        "patch_image": Feature("patches", to="images"),
        "file_bytes": Feature("images", dtype="int32"),
        "label": Feature("images", dtype="int32"),
        "files": Feature("files", dtype="uint8"),
    }
    corpus = pipeline.Corpus.from_arrays(
        columns, folder / "corpus", features=features, loss="images"
    )
    # Lockstep: the bytes leave, and patches are made of them when a batch is built.
    made = {
        "patches": Feature("patches", dtype="uint8", shape=(3 * PATCH**2,)),
        "patch_yx": Feature("patches", dtype="int32", shape=(2,)),
    }
    return pipeline.Decoded(corpus, decode, features=made)


class Model(nnx.Module):
    """Logits of the shape in each picture: [rows, pictures, 3]."""

    def __init__(self, rngs):
        self.patches = nnx.Linear(3 * PATCH**2, WIDTH, rngs=rngs)
        self.places = nnx.List([nnx.Embed(64, WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, len(SHAPES), rngs=rngs)

    def __call__(self, batch):
        """Each patch attends to its picture; their means are classified."""
        # Lockstep: patch_image is the picture of each patch in the row, -1 on padding.
        image = batch["patch_image"]
        x = self.patches(batch["patches"] / 127.5 - 1)
        x += sum(table(batch["patch_yx"][:, :, axis]) for axis, table in enumerate(self.places))
        same = (image[:, :, None] == image[:, None]) & (image >= 0)[:, :, None]
        x += self.attention(x, mask=same[:, None])
        x = nnx.gelu(self.hidden(x))
        of = (image[:, None] == np.arange(batch["label"].shape[1])[:, None]).astype(x.dtype)
        return self.head(of @ x / jnp.maximum(of.sum(axis=2, keepdims=True), 1))


def loss_sum(model, batch):
    """The sum of the losses of the pictures; padding has weight 0."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["label"])
    return (losses * batch["loss_weights"]).sum()


@nnx.jit
def train_step(model, optimizer, batch):
    """Updates model and optimizer in place; returns the mean loss of the batch."""
    weight = batch["loss_weights"].sum().clip(1)
    loss, gradients = nnx.value_and_grad(lambda model: loss_sum(model, batch) / weight)(model)
    optimizer.update(model, gradients)
    return loss


def train(folder, steps, tokens_per_batch):
    """Trains from the beginning, and prints the losses."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    # Lockstep: rows of patches in one static shape; pictures cost nothing.
    loader = pipeline.load(
        make_corpus(folder),
        tokens_per_batch=tokens_per_batch,
        max_buckets=1,
        cost={"patches": 1.0, "images": 0.0},
        num_threads=2,  # decode pictures ahead
    )
    with loader:
        print(loader.plan)
        for step, batch in zip(range(steps), loader, strict=False):
            print("step", step, "loss", float(train_step(model, optimizer, batch)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--pictures", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    options = parser.parse_args()
    if not (options.folder / "pictures.jsonl").exists():
        draw_pictures(options.folder, options.pictures)
    train(options.folder.absolute(), options.steps, options.tokens_per_batch)
