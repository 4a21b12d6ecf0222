"""A model, as the functions that a training program needs of it; and the networks of configs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from ml_collections import ConfigDict

from models import Decoder, Encoder, EncoderDecoder, TransformerConfig, VisionDecoder, step_flops
from pipeline.corpus.interface import AnyCorpus
from pipeline.errors import InvalidValue, require_one_of
from pipeline.planning.planned import PlannedBatch


class Model(NamedTuple):
    """A model whose only state is its parameters: it has no dropout and no batch statistics.

    Attributes:
        init_params: makes the parameters, a pytree, from a key of `jax.random`.
        loss: from parameters and a batch to two scalars, Σ weight · loss and Σ weight. It is linear
            in `batch["loss_weights"]`, from which the losses of segments are computed.
        flops: the floating-point operations of a training step on a planned batch, for the
            utilisation in the log; 0.0 if unknown.
    """

    init_params: Callable[[jax.Array], Any]
    loss: Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]
    flops: Callable[[PlannedBatch], float]


class Network(NamedTuple):
    """A network of a config: `make(rngs)` makes the module.

    `fields` are the fields of a batch that it is called with, in order; in place of those that a
    batch lacks, it takes None. `flops` is that of a `Model`.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    fields: tuple[str, ...]
    flops: Callable[[PlannedBatch], float]


INPUTS = "inputs", "inputs_segment_ids", "inputs_positions"
TARGETS = "decoder_inputs", "targets_segment_ids", "targets_positions"
GROUPS = ("visible_until",)  # several continuations of one prefix
OFFSETS = "inputs_segment_offsets", "targets_segment_offsets"  # see `choose_features`
PATCHES = "patches", "patch_image", "patch_yx", "patch"  # features, as in configs/vision.py

# For each `config.architecture`: the module, its fields, and the sides that a corpus must have.
ARCHITECTURES: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "decoder": (Decoder, INPUTS + GROUPS + OFFSETS[:1], ("inputs",)),
    "encoder": (Encoder, INPUTS + GROUPS + OFFSETS[:1], ("inputs",)),
    "encoder_decoder": (EncoderDecoder, INPUTS + TARGETS + OFFSETS, ("inputs", "targets")),
    "vision_decoder": (
        VisionDecoder,
        INPUTS + PATCHES + OFFSETS[:1],
        ("inputs", "patches", "images"),
    ),
}


def choose_layout(config: ConfigDict, corpus: AnyCorpus, sharding: Any) -> dict[str, Any]:
    """The options of `Batches`, for training and evaluation."""
    features = choose_features(config, corpus)
    return {"sharding": sharding, "context_order": config.context_order, "features": features}


def choose_features(config: ConfigDict, corpus: AnyCorpus) -> list[str] | None:
    """The features of batches, with the offsets of segments if attention takes them; None: all."""
    if config.model.attention != "cudnn_packed":
        return None
    of_text = [name for name in OFFSETS if name.split("_")[0] in corpus.side_names]
    return [*corpus.features, *of_text]


def transformer_config(config: ConfigDict, corpus: AnyCorpus) -> TransformerConfig:
    """The sizes of `config.model`, checked."""
    try:
        return TransformerConfig(vocab_size=corpus.vocab_size or 0, **config.model)
    except (TypeError, ValueError) as error:  # its message names the field
        raise InvalidValue(f"config.model: {error}") from error


def choose_network(config: ConfigDict, corpus: AnyCorpus) -> Network:
    """The network that `config.architecture` and `config.model` describe, for a corpus."""
    kind = config.architecture
    require_one_of("config.architecture", kind, ARCHITECTURES)
    module, fields, sides = ARCHITECTURES[kind]
    if tuple(corpus.side_names) != sides:
        raise InvalidValue(
            f"config.architecture is {kind!r}, which takes the sides {', '.join(sides)}, and the "
            f"corpus has {', '.join(corpus.side_names)}; give 'encoder_decoder' for pairs, "
            "'vision_decoder' for text with patches, and load other sides with pipeline.load in a "
            "loop of your own, as in docs/sides.md"
        )
    if (config.task.kind == "masked") != (kind == "encoder"):
        raise InvalidValue(
            f"config.task.kind is {config.task.kind!r} and config.architecture is {kind!r}; an "
            "encoder sees what follows, so it needs the task 'masked', and only it has that task"
        )
    sizes, options = transformer_config(config, corpus), {}
    if kind == "vision_decoder":
        options["patch_size"] = corpus.features["patches"].size

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return module(sizes, rngs=rngs, **options)

    def flops(planned: PlannedBatch) -> float:
        # The columns of segments: row, example, start, length; for pairs two lengths.
        example, lengths = planned.segments[:, 1], planned.segments[:, 3:]
        if kind == "vision_decoder":  # exact if an example has one picture
            # The table of patches is like that of ids.
            encoder = dataclasses.replace(sizes, vocab_size=options["patch_size"])
            return step_flops(encoder, lengths[:, 1:2], bidirectional=True) + step_flops(
                sizes, lengths[:, :1]
            )
        trees = None if corpus.trees is None else corpus.trees[example]  # of groups
        return step_flops(sizes, lengths, bidirectional=kind == "encoder", trees=trees)

    return Network(make, fields, flops)
