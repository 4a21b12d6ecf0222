"""Examples that are drawn: of any sides, with features of each kind, and pointers between sides."""

import itertools

import numpy as np

from pipeline import Examples, Feature
from pipeline.corpus import CAUSAL
from tests.loading.definition import define_fields

ARRAYS = "frames", "patches", "images"
SHAPES = {"uint8": (3,), "float32": (), "int32": (2, 2), "bool": (1,)}
FEATURES = {
    "seen": Feature("inputs", dtype=bool, fill=True),
    "experts": Feature("inputs", dtype="int8", shape=(2, 3), fill=-3),
    "logprob": Feature("targets", dtype="float32", fill=0.5),
    "halves": Feature("targets", dtype="bfloat16", shape=2, fill=7),
    "reward": Feature("example", dtype="float32", fill=-1),
    "group": Feature("example", dtype="uint32", shape=(2,), fill=9),
}


class Drawn:
    """Examples with tokens of a task, or without, and some sides of arrays.

    Each has fewer than `most` tokens, and positions of each side.

    Attributes:
        names: of the sides.
        columns: as `Examples` takes them.
        features: of the columns.
        sizes: for each side, the positions of each example.
    """

    def __init__(self, rng, task=CAUSAL, arrays=(), examples=14, most=9):
        self.rng, self.task, self.count = rng, task, examples
        self.names = [*([task.side] if task else []), *arrays]
        self.columns, self.features = {}, {}
        self._counts = {name: rng.integers(0, most, self.count) for name in self.names}
        self.sizes = dict(self._counts)
        if task:
            counts = self._counts[task.side]
            self.columns["tokens"] = [rng.integers(1, 90, n) for n in counts]
            self.sizes[task.side] = np.maximum(counts - task.lookahead, 0)
        for side in arrays:
            dtype = str(rng.choice([*SHAPES]))
            self.add(side, Feature(side, dtype=dtype, shape=SHAPES[dtype]))

    def add(self, name, feature):
        """A feature with random values, or with pointers to positions and to nothing."""
        side = self.task.side if feature.of == "targets" else feature.of
        counts = self._counts.get(side, [()] * self.count)  # one value for each example
        room = self.sizes.get(feature.to, [1 + (feature.dtype != bool) * 89] * self.count)
        self.features[name] = feature
        self.columns[name] = [
            self.rng.integers(-1 if feature.to else 0, most + (not feature.to), shape)
            .astype(np.int32 if feature.to else feature.dtype)
            for shape, most in zip(
                [(*np.ravel(n).astype(int), *feature.shape) for n in counts], room, strict=True
            )
        ]  # fmt: skip

    def add_pointers(self):
        """Pointers between about half of all pairs of sides, also from a side to itself."""
        for side, to in itertools.product(self.names, self.names):
            if self.rng.random() < 0.5:
                self.add(f"{side}_to_{to}", Feature(side, to=to, shape=() if side == to else (2,)))

    def add_features(self, names=tuple(FEATURES)):
        """Those of `FEATURES` that such examples can have."""
        sides = {"example", *self.names, *(self.task.shifts if self.task else ())}
        for name in names:
            if FEATURES[name].of in sides:
                self.add(name, FEATURES[name])

    @property
    def options(self):
        """The arguments of `Examples` and `from_arrays` beside the columns."""
        return {"features": self.features, **({"task": self.task} if self.task else {})}

    def examples(self, numbers=None, **options):
        """The examples in memory, or those with these numbers."""
        columns = self.columns if numbers is None else self.take(numbers)
        return Examples(columns, **self.options, **options)

    def take(self, numbers):
        """The columns of the examples with these numbers."""
        return {name: [column[int(n)] for n in numbers] for name, column in self.columns.items()}

    def fields(self, columns=None, features=None):
        """What examples have in each field of a batch: these, or those of other columns."""
        columns = self.columns if columns is None else columns
        features = self.features if features is None else features
        return define_fields(columns, features, self.task and self.task.name)
