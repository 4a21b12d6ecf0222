"""MaxText's input pipelines, with stubs for tokenizers alone."""

import json
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import datasets
import jax
import maxtext
import numpy as np
import yaml
from array_record.python.array_record_module import ArrayRecordWriter
from maxtext.input_pipeline import grain_data_processing, hf_data_processing, tokenizer
from maxtext.input_pipeline.protos import example_pb2

from benchmarks.input_paths import BEGIN, PADDING, InputPath


class MaxText(InputPath):
    """MaxText's Grain pipeline with the options of its base.yml, over an ArrayRecord file."""

    packages = ("maxtext", "grain")
    remark = "with expansion_factor_real_data=0.5: batches of half the size"

    def __init__(self, documents, length):
        super().__init__(documents, length)
        self._folder = tempfile.TemporaryDirectory()
        self.file = Path(self._folder.name, "documents")
        self.write()

    def write(self):
        """The numbers of the documents, as the text that the tokenizer below turns into ids."""
        writer = ArrayRecordWriter(str(self.file), "group_size:1")
        for number in range(len(self.documents)):
            example = example_pb2.Example()
            example.features.feature["text"].bytes_list.value.append(str(number).encode())
            writer.write(example.SerializeToString())
        writer.close()

    def config(self, rows):
        """The options of MaxText's base.yml, for one host and this file."""
        base = Path(maxtext.__path__[0], "configs", "base.yml").read_text()
        changes = {
            "max_target_length": self.length,
            "global_batch_size_to_load": rows,
            "grain_worker_count": 0,
            "num_epoch": 1,
        }
        return types.SimpleNamespace(**(yaml.safe_load(base) | changes))

    def start(self, rows, host, hosts):
        tokenizer.build_tokenizer = lambda *_: _Numbers(self.documents)
        config = self.config(rows // hosts)
        data = grain_data_processing.get_datasets(
            str(self.file),
            "arrayrecord",
            shuffle=config.enable_data_shuffling,
            shuffle_seed=config.data_shuffle_seed,
            shuffle_buffer_size=config.grain_shuffle_buffer_size,
            num_epoch=config.num_epoch,
            dataloading_host_index=host,
            dataloading_host_count=hosts,
            grain_worker_count=config.grain_worker_count,
            grain_num_threads=config.grain_num_threads,
            grain_prefetch_buffer_size=config.grain_prefetch_buffer_size,
            grain_data_source_max_workers=config.grain_data_source_max_workers,
        )
        prepare = grain_data_processing.pretrain_preprocessing_pipeline
        return iter(prepare(data, config, ["text"], True, 0, config.grain_per_worker_buffer_size))

    def convert(self, element):
        return {
            "inputs": element["inputs"],
            "targets": element["targets"],
            "inputs_segment_ids": element["inputs_segmentation"],
            "inputs_positions": element["inputs_position"],
            "loss_weights": (element["targets_segmentation"] > 0).astype(np.float32),
        }

    def resume(self, rows, states):
        hosts = len(states)
        iterators = [self.start(rows, host, hosts) for host in range(hosts)]
        for iterator, state in zip(iterators, states, strict=True):
            iterator.set_state(state)
        return _alternate(iterators)


class HuggingFace(MaxText):
    """MaxText's Hugging Face pipeline, streaming a JSON lines file."""

    packages = ("maxtext", "datasets")
    remark = "no state"

    def write(self):
        lines = (json.dumps({"text": str(number)}) for number in range(len(self.documents)))
        self.file.write_text("\n".join(lines))

    def start(self, rows, host, hosts):
        numbers = types.SimpleNamespace(from_pretrained=lambda *_, **__: _Numbers(self.documents))
        hf_data_processing.transformers = types.SimpleNamespace(AutoTokenizer=numbers)
        config = self.config(rows // hosts)
        iterator = hf_data_processing.preprocessing_pipeline(
            dataloading_host_index=host,
            dataloading_host_count=hosts,
            global_mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), "data"),
            dataset=datasets.load_dataset(
                "json", data_files=str(self.file), split="train", streaming=True
            ),
            config=config,
            data_column_names=["text"],
            tokenize=True,
            tokenizer_path="",
            hf_access_token=None,
            global_batch_size=rows // hosts,
            max_target_length=self.length,
            shuffle=config.enable_data_shuffling,
            data_shuffle_seed=config.data_shuffle_seed,
            grain_worker_count=0,
            max_segments_per_seq=config.max_segments_per_seq,
        )
        return iter(iterator.dataloader)

    def state(self, iterator, steps):
        return None


class _Numbers:
    """A tokenizer for both of MaxText's pipelines: the text "17" is document 17."""

    pad_id = pad_token_id = PADDING
    bos_id = bos_token_id = BEGIN

    def __init__(self, documents):
        self._documents = documents

    def encode(self, text):
        return self._documents[int(text)].tolist()

    def __call__(self, text, truncation, max_length):
        return {"input_ids": self.encode(text)[: max_length if truncation else None]}


def _alternate(iterators: list[Iterator]) -> Iterator:
    """One element of each in turn, until none has more."""
    while iterators:
        for iterator in [*iterators]:
            try:
                yield next(iterator)
            except StopIteration:
                iterators.remove(iterator)
