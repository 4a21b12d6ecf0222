"""A TFDS data set of 30 questions with their answers, and 20 more in a split of their own."""

import tensorflow_datasets as tfds

RECORDS = [{"text": f"what is {n}? " + "It is é " * (n % 5) + str(n)} for n in range(30)]
MORE = [{"text": f"who is {n}? Nobody {n}"} for n in range(20)]


class Questions(tfds.core.GeneratorBasedBuilder):
    """The records, by the names of the splits "train" and "validation"."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        splits = {"train": RECORDS, "validation": MORE}
        return {name: enumerate(records) for name, records in splits.items()}

    def _generate_examples(self):
        raise NotImplementedError


def write_questions(directory):
    """Prepares the data set "questions" below `directory`."""
    Questions(data_dir=str(directory), file_format="array_record").download_and_prepare()
