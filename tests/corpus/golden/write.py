"""Writes the token files in this folder with the programs whose formats they have.

    python -m tests.corpus.golden.write arrow megatron  # each where its packages are installed

They are datasets 5.2.0 (arrow), megatron-core 0.16.0, and dolma 1.2.1 with ai2-olmo-core 3.0.0
(olmo). nanoGPT and llm.c are no packages: their files (flat) are written as their scripts do.
`expected.json` has the documents of each data set, and their masks, as the program's own reader
gives them.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.corpus.token_writers import write_llm_c

HERE = Path(__file__).parent
END = 50256
DOCUMENTS = [[5, 6, 7, END], [8, END], [END], [9, 10, 11, 12, 13, 14, END], [15, 16, END]]
MASKS = [[0, 0, 1, 1], [1, 1], [0], [0, 0, 0, 0, 1, 1, 0], [0, 0, 0]]


def join(lists: Any) -> list[int]:
    """Lists, one after another."""
    return [*itertools.chain(*lists)]


def write_arrow(folder: Path) -> Any:
    """Saved twice, the second time with fewer files; and a data set with splits."""
    datasets = importlib.import_module("datasets")
    labels = [
        [i if m else -100 for i, m in zip(*pair, strict=True)]
        for pair in zip(DOCUMENTS, MASKS, strict=True)
    ]
    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS, "labels": labels})
    rows.save_to_disk(folder / "rows", num_shards=3)
    rows.select(range(4)).save_to_disk(folder / "rows", num_shards=2)
    splits = datasets.DatasetDict({"train": rows, "test": rows.select([3, 1])})
    splits.save_to_disk(folder / "splits")
    data_set = datasets.load_from_disk(folder / "rows")
    masks = [[int(label != -100) for label in row] for row in data_set["labels"]]
    test = datasets.load_from_disk(folder / "splits")["test"]
    return {"rows": [data_set["input_ids"][:], masks], "splits": [test["input_ids"][:], None]}


def write_megatron(folder: Path) -> Any:
    """Documents of one sequence each, and of several; read by sequences and by documents."""
    indexed = importlib.import_module("megatron.core.datasets.indexed_dataset")
    expected = {}
    for name, dtype, sizes in (("text", np.uint16, 9), ("sentences", np.int32, 3)):
        builder = indexed.IndexedDatasetBuilder(f"{folder / name}.bin", dtype=dtype)
        for document in DOCUMENTS:
            lengths = [len(document[at : at + sizes]) for at in range(0, len(document), sizes)]
            builder.add_document(np.array(document), lengths)
        builder.finalize(f"{folder / name}.idx")
        read = indexed.IndexedDataset(f"{folder / name}")
        sequences = [read[number].tolist() for number in range(len(read))]
        first = read.document_indices.tolist()
        documents = [join(sequences[a:b]) for a, b in itertools.pairwise(first)]
        expected[name] = documents, None
    return expected


def write_olmo(folder: Path) -> Any:
    """A file with its table, as Dolma writes it; and one with a mask, as OLMo-core reads it."""
    memmap = importlib.import_module("dolma.tokenizer.memmap_writer")
    types_ = importlib.import_module("dolma.tokenizer.data_types")
    utils = importlib.import_module("olmo_core.data.utils")
    with memmap.MemmapWriter(f"{folder / 'part-0'}", np.dtype("uint16"), max_tokens=40) as writer:
        for number, document in enumerate(DOCUMENTS):
            name = f'id "{number}", of a'
            writer.write(types_.TokenizerOutput.from_tokens(name, "a.gz", number, document))
    (folder / "masked").mkdir()
    for name in ("part-0.npy", "part-0.csv.gz"):
        other = name.replace("part-0", "token_ids_part_0000")
        shutil.copy(folder / name, folder / "masked" / other)
    mask = np.array(join(MASKS), bool)
    mask.tofile(folder / "masked" / "labels_mask_part_0000.npy")
    documents = utils.get_document_indices(folder / "part-0.npy")
    read = [
        utils.load_array_slice(folder / "part-0.npy", a, b, np.uint16).tolist()
        for a, b in documents
    ]
    masks = [mask[a:b].astype(int).tolist() for a, b in documents]
    return {"part-0.npy": [read, None], "masked": [read, masks]}


def write_flat(folder: Path) -> Any:
    """nanoGPT's file, whose documents end with the mark; llm.c's, where they begin with it."""
    flat = np.array(join(DOCUMENTS), np.uint16)
    flat.tofile(folder / "train.bin")
    begun = [[END, *document[:-1]] for document in DOCUMENTS]
    for name, magic, version, dtype in (
        ("gpt2", 20240520, 1, np.uint16),
        ("llama3", 20240801, 7, np.uint32),
    ):
        ids = np.array(join(begun), dtype)
        ids[ids == END] = 128000 if dtype is np.uint32 else END
        for number, some in enumerate(np.array_split(ids, 2)):  # cut inside a document
            write_llm_c(folder / f"{name}_{number}.bin", some, magic, version, dtype)
    llama3 = [[128000, *document[1:]] for document in begun]
    return {"train.bin": [DOCUMENTS, None], "gpt2": [begun, None], "llama3": [llama3, None]}


def main() -> None:
    """Writes the data sets of the named programs anew."""
    expected = json.loads((HERE / "expected.json").read_text())
    for name in sys.argv[1:]:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        expected[name] = globals()[f"write_{name}"](folder)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
