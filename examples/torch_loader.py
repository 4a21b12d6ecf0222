"""A PyTorch loop: torch's own DataLoader with worker processes, fed by Lockstep. Needs no JAX.

    pip install lockstep-pipeline torch
    python examples/torch_loader.py --workdir=runs/torch

Copy this file, and put your model and your text into it. Run the command again, also after a kill:
it continues from its last checkpoint, with the same losses. Comments that begin with "Lockstep:"
say what the line below does.
"""

import argparse
import email
import os
import pathlib

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import pipeline
from pipeline import sources, tokenizers

WIDTH = 32


class Model(torch.nn.Module):
    """One layer of attention: a batch to logits `[rows, length, vocabulary]`."""

    def __init__(self, vocab_size, positions):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocab_size, WIDTH)
        self.positions = torch.nn.Embedding(positions, WIDTH)
        self.heads = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, vocab_size)

    def forward(self, batch):
        """Logits of the next tokens."""
        # Lockstep: a row holds several examples, and each attends only to itself.
        ids = batch["inputs_segment_ids"]
        mask = (ids[:, :, None] == ids[:, None, :]).tril()
        # Lockstep: positions begin at 0 in each example; do not use the column number.
        x = self.tokens(batch["inputs"]) + self.positions(batch["inputs_positions"])
        query, key, value = self.heads(x).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(functional.gelu(x))


def mean_loss(model, batch):
    """The mean loss of the tokens of a batch."""
    logits, targets = model(batch).flatten(0, 1), batch["targets"].flatten().long()
    losses = functional.cross_entropy(logits, targets, reduction="none")
    # Lockstep: batches hold different numbers of tokens; padding has weight 0. On several ranks,
    # add up both sums over all ranks.
    weights = batch["loss_weights"].flatten()
    return (losses * weights).sum() / weights.sum().clip(1e-9)


def make_corpus(directory):
    """The paragraphs of Python's own email package, as a corpus of bytes."""
    files = sorted(pathlib.Path(email.__file__).parent.glob("*.py"))
    texts = [text for file in files for text in file.read_text("utf-8").split("\n\n")]
    # Lockstep: tokenises once; the next call opens the corpus.
    return pipeline.prepare(sources.Records(texts), tokenizers.Bytes(), directory)


def train(workdir, steps, save_every, workers):
    """Trains from the checkpoint in `workdir`, or from the beginning, to `steps`."""
    corpus = make_corpus(workdir / "corpus")
    # Lockstep: a few shapes, and the plan of every batch, from lengths alone.
    buckets = pipeline.fit_buckets(
        corpus, tokens_per_batch=2048, max_buckets=4, max_length=256, width=WIDTH
    )
    plan = pipeline.Plan(corpus, buckets, seed=0)
    # Lockstep: `batches[step]` is a dict of NumPy arrays, for any step of any epoch. On several
    # ranks, process_index=rank and process_count=world_size give the rows of one rank.
    batches = pipeline.Batches(corpus, plan)

    torch.manual_seed(0)
    # Lockstep: the table of positions is as large as the plan needs.
    model = Model(corpus.vocab_size, plan.max_position + 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    path, first = workdir / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        # Lockstep: the next step, or an error that says which setting or text has changed.
        first = batches.origin.resume(saved["data"])

    # Lockstep: batch_size=None, because an item is a whole batch.
    remaining = range(first, steps)
    loader = DataLoader(batches, batch_size=None, sampler=remaining, num_workers=workers)
    for step, batch in zip(remaining, loader, strict=True):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        print("step", step, "shape", tuple(batch["inputs"].shape), "loss", loss.item())
        if (step + 1) % save_every == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            # Lockstep: the step and a fingerprint of the plan, the same on every rank.
            state["data"] = batches.origin.state(step + 1)
            torch.save(state, workdir / "checkpoint.new")
            os.replace(workdir / "checkpoint.new", path)  # whole or not at all


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    train(options.workdir.absolute(), options.steps, options.save_every, options.workers)
