"""Trains a decoder that sees pictures: questions about shapes and colours, drawn by this file.

    python train.py --config=configs/vision.py

Takes minutes on two cores, and needs Pillow. Pictures of 32 to 512 pixels are stored as JPEG, and
decoded when a batch is built. Of `config.model`, the encoder of patches and the decoder are alike.
"""

import functools
import io
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict
from PIL import Image, ImageDraw

import pipeline
from configs import quickstart

# Ids below 256 are the bytes of questions and answers.
PATCH, BEGIN, VOCAB_SIZE = 256, 257, 258
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 220)}
SHAPES = "circle", "square", "triangle"
CUT = {"patch": 32, "max_patches": 256}

STORED = {
    "patch": pipeline.Feature("inputs", to="patches"),
    "patch_image": pipeline.Feature("patches", to="images"),
    "file_bytes": pipeline.Feature("images", dtype="int32"),
    "files": pipeline.Feature("files", dtype="uint8"),
}
DECODED = {
    "patches": pipeline.Feature("patches", dtype="uint8", shape=CUT["patch"] ** 2 * 3),
    "patch_yx": pipeline.Feature("patches", dtype="int32", shape=2),
}


def get_config() -> ConfigDict:
    """The configuration of a decoder that sees pictures."""
    config = quickstart.get_config()
    config.steps, config.eval_every = 600, 150
    config.num_threads = 2
    # The numbers of the first picture and after the last one; each number has its own picture.
    config.train.split, config.eval.split = "0:6000", "6000:6400"
    for part in (config.train, config.eval):
        part.source, part.corpus = "", "configs.vision:make_corpus"
    config.tokenizer.kind = "bytes"

    # A row has text, patches, and room for pictures, which cost nothing.
    batches = config.batches
    batches.update(tokens_per_batch=4096, max_buckets=1, attention="segment", overflow="drop")
    batches.cost = ConfigDict({"inputs": 1.0, "patches": 1.0, "images": 0.0})
    with batches.ignore_type():
        batches.max_length, batches.length_multiple = (
            None,
            {"inputs": 64, "patches": 64, "images": 1},
        )

    config.architecture = "vision_decoder"
    config.model.update(num_layers=2, width=96, mlp_width=256)
    config.optimizer.learning_rate = 2e-3
    return config


def make_corpus(split: str, directory: epath.Path) -> pipeline.Decoded:
    """Questions about pictures, written into `directory` if they are not there yet."""
    if (directory / "sides.json").exists():
        corpus: Any = pipeline.Corpus.open(directory)
    else:
        columns: dict[str, list] = {name: [] for name in ("tokens", "weights", *STORED)}
        for number in range(*map(int, split.split(":"))):
            for name, value in make_example(number).items():
                columns[name].append(value)
        corpus = pipeline.Corpus.from_arrays(
            columns, directory, features=STORED, vocab_size=VOCAB_SIZE
        )
    decode = functools.partial(pipeline.patchify, **CUT)
    return pipeline.Decoded(corpus, decode, features=DECODED)


def make_example(number: int) -> dict[str, Any]:
    """A picture as a file, a token for each of its patches, a question, and the answer."""
    content, question, answer = draw(number)
    rows, columns = pipeline.patch_grid(content, **CUT)
    patches, text = rows * columns, f"{question} {answer}".encode()
    tokens = [BEGIN, *[PATCH] * patches, *text]
    return {
        "tokens": tokens,
        "weights": [0.0] * (len(tokens) - 1) + [1.0],  # the loss is on the answer
        "patch": [-1, *range(patches), *[-1] * len(text)],
        "patch_image": [0] * patches,
        "file_bytes": [len(content)],
        "files": np.frombuffer(content, np.uint8),
    }


def draw(number: int) -> tuple[bytes, str, str]:
    """A JPEG of one to four shapes, a question about it, and the answer, of one letter."""
    rng = np.random.default_rng(number)
    width, height = np.exp(rng.uniform(np.log(32), np.log(512), 2)).astype(int)
    picture = Image.new("RGB", (width, height), (235, 235, 235))
    pen, colours, shapes = ImageDraw.Draw(picture), [], []
    for cell in rng.permutation(4)[: rng.integers(1, 5)]:
        colour, shape = str(rng.choice([*COLOURS])), str(rng.choice(SHAPES))
        left, top = width * (cell % 2) / 2, height * (cell // 2) / 2
        box = (left + width / 16, top + height / 16, left + width * 7 / 16, top + height * 7 / 16)
        corners = [(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) / 2, box[1])]
        if shape == "triangle":
            pen.polygon(corners, fill=COLOURS[colour])
        else:
            (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=COLOURS[colour])
        colours.append(colour)
        shapes.append(shape)
    content = encode(picture)
    single = [shape for shape in shapes if shapes.count(shape) == 1]
    if single and rng.random() < 0.5:
        shape = str(rng.choice(single))
        return content, f"the {shape} is", colours[shapes.index(shape)][0]
    colour = str(rng.choice([*COLOURS]))
    return content, f"how many {colour}", str(colours.count(colour))


def encode(picture: Image.Image) -> bytes:
    """The bytes of a picture as JPEG."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()
