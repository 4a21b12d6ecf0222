"""Torch loaders as the trainers of Hugging Face make them."""

import datasets
import numpy as np
import torch
import trl
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks.input_paths import PADDING, InputPath


class Torch(InputPath):
    """A torch DataLoader as the Trainer of transformers makes it: sampler, collator, accelerate."""

    packages = ("trl", "transformers", "accelerate")
    padding_free = False

    def start(self, rows, host, hosts):
        data, sampler = self.data_and_sampler(rows // hosts, torch.Generator().manual_seed(0))
        collate = DataCollatorForLanguageModeling(PADDING, padding_free=self.padding_free)
        loader = torch.utils.data.DataLoader(
            data,
            rows // hosts,
            sampler=sampler,
            collate_fn=lambda examples: (
                collate(examples),
                [len(example["input_ids"]) for example in examples],
            ),
        )
        self._loader = prepare_data_loader(
            loader, num_processes=hosts, process_index=host, put_on_device=False, rng_types=[]
        )
        return iter(self._loader)

    def data_and_sampler(self, rows: int, generator: torch.Generator) -> tuple:
        """What is loaded, and in which order, for batches of `rows` on each host."""
        raise NotImplementedError

    def shape(self, element, batch):
        return tuple(element[0]["input_ids"].shape)

    def state(self, iterator, steps):
        return steps

    def resume(self, rows, states):
        self.start(rows, 0, 1)
        return iter(skip_first_batches(self._loader, states[0]))

    def convert(self, element):
        collated, sizes = element
        fields = {name: field.numpy() for name, field in collated.items() if hasattr(field, "ndim")}
        if not self.padding_free:
            tokens, labels = fields["input_ids"], fields["labels"]
            segments = fields["attention_mask"]
            positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) * segments
        else:  # one row of all; here, rows of `length` again

            def unflatten(flat):
                rows = np.zeros((len(sizes), self.length), flat.dtype)
                for row, part in zip(rows, np.split(flat, np.cumsum(sizes)[:-1]), strict=True):
                    row[: len(part)] = part
                return rows

            tokens, labels, positions = (
                unflatten(fields[name][0]) for name in ("input_ids", "labels", "position_ids")
            )
            segments = np.cumsum((positions == 0) & (tokens > PADDING), 1) * (tokens > PADDING)
        # The loss of transformers compares the logits of a position with the label of the next.
        after = np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
        weights = (after > PADDING) & (segments > 0)
        return {
            "inputs": tokens,
            "targets": np.where(weights, after, PADDING),
            "inputs_segment_ids": segments,
            "inputs_positions": positions,
            "loss_weights": weights.astype(np.float32),
        }


class TRL(Torch):
    """Packed by `trl.pack_dataset` before training."""

    def __init__(self, documents, length, strategy):
        super().__init__(documents, length)
        datasets.disable_caching()
        datasets.disable_progress_bars()
        self.strategy, self.padding_free = strategy, strategy != "wrapped"
        self._examples = datasets.Dataset.from_dict({"input_ids": documents})

    def data_and_sampler(self, rows, generator):
        packed = trl.pack_dataset(self._examples, self.length, self.strategy)
        return packed, torch.utils.data.RandomSampler(packed, generator=generator)


class LengthGrouped(Torch):
    """One document in a row, padded to the longest of a batch of documents of like lengths."""

    def data_and_sampler(self, rows, generator):
        data = [{"input_ids": document[: self.length]} for document in self.documents]
        return data, LengthGroupedSampler(rows, data, generator=generator)
