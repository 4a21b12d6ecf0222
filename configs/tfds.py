"""Trains on a data set of TFDS, which it makes itself: the functions of the standard library.

    python train.py --config=configs/tfds.py

Takes minutes on two cores, and no TensorFlow. The data set is made in `~/tensorflow_datasets`, or
where TFDS_DATA_DIR says; hosts must share that directory. Other data sets that were prepared there
with `file_format="array_record"`: `--config.train.split='NAME/train[:95%]'`,
`--config.train.field`, and the same of `config.eval`.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds
from ml_collections import ConfigDict

from configs import python_data, quickstart
from pipeline.fs import directory_lock


class PythonFunctions(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Records `{"text"}`, each a function of the standard library, in the split "train"."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, str]]]:
        for number, record in enumerate(python_data.Functions("train")):
            yield number, {"text": record["text"]}


def get_config() -> ConfigDict:
    """The configuration of a decoder; the data set is made if it is not there yet."""
    builder = PythonFunctions(file_format="array_record")
    with directory_lock(builder.data_path.parent, "preparing the data set"):
        builder.download_and_prepare()

    config = quickstart.get_config()
    for part, split in ((config.train, "train[:95%]"), (config.eval, "train[95%:]")):
        part.source, part.split = "configs.tfds:open_split", f"{builder.name}/{split}"
    return config


def open_split(name: str) -> Any:
    """The records of DATA_SET/SPLIT, which is on disk; nothing is downloaded."""
    data_set, _, split = name.rpartition("/")
    builder = tfds.core.read_only_builder.builder_from_files(data_set)
    return builder.as_data_source(split)
