"""Files of masks beside token files of other programs are read or refused, and never ignored."""

import numpy as np
import pytest

from pipeline import InPlace
from tests.corpus.files import weights_of
from tests.corpus.token_writers import write_megatron

TOKENS, MASK = np.array([5, 6, 9, 7, 8, 9], np.uint16), np.array([0, 1, 1, 0, 1, 1], np.uint8)
LABELS = np.where(MASK, TOKENS, -100).astype(np.int32)
WEIGHTS = [[1, 1], [1, 1]]
FLAT = {"dtype": "uint16", "end": 9}
FORMATS = "flat", "npy", "megatron"


@pytest.fixture
def opened(tmp_path):
    """A function that opens the tokens of a format, `name` in the folder `data`."""
    folder = tmp_path / "data"
    folder.mkdir()

    def open_tokens(form, name="train", **options):
        if form == "flat":
            TOKENS.tofile(folder / f"{name}.bin")
            return InPlace.flat(folder / f"{name}.bin", **FLAT, **options)
        if form == "megatron":
            write_megatron(folder / name, [[TOKENS[:3]], [TOKENS[3:]]], "uint16")
            return InPlace.megatron(folder / name, **options)
        np.save(folder / f"{name}.npy", TOKENS)
        np.save(folder / "offsets.npy", [0, 3, 6])
        return InPlace.npy(folder / f"{name}.npy", folder / "offsets.npy", **options)

    open_tokens.folder = folder
    return open_tokens


def save(path, array):
    path.parent.mkdir(exist_ok=True)
    np.save(path, array) if path.suffix == ".npy" else array.tofile(path)
    return path


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "name",
    [
        *("mask.bin", "loss_mask.npy", "labels_mask.npy", "train_mask.bin", "train_loss_mask.bin"),
        *("mask_train.bin", "train.mask", "train.bin.mask", "train.bin.loss_mask", "train.loss"),
        "train.u8mask",
        *("TRAIN-MASK.bin", "trainMask.bin", "trainmask.bin", "train_attention_mask.npy"),
        *("train_labels.bin", "train-role.bin", "train_weights.bin", "labels.npy"),
        *("masks/train.", "../loss_mask/train."),
    ],
)
def test_a_mask_beside_its_tokens_is_read_or_refused(form, name, opened):
    ending = {"npy": "npy"}.get(form, "bin")
    path = save(opened.folder / f"{name}{ending if name.endswith('.') else ''}", MASK)
    sentence = rf"{path.name}, by its name, says of train.{ending} on which tokens to train; give w"
    with pytest.raises(ValueError, match=sentence):
        opened(form)
    assert weights_of(opened(form, weights=path)) == WEIGHTS
    assert not opened(form, weights=()).weighted
    path.unlink()
    assert not opened(form).weighted


@pytest.mark.parametrize("form", FORMATS)
def test_labels_with_an_entry_for_each_token_are_a_mask_to_be_written(form, opened, caplog):
    for name, array in (("train_labels.npy", LABELS), ("train_loss_weights.bin", MASK * 0.5)):
        path = save(opened.folder / name, array)
        with pytest.raises(ValueError, match=f"{name}, by its name, .*or weights=.. to train on a"):
            opened(form)
        with pytest.raises(ValueError, match="give a file with a byte for each token, 1 to train"):
            opened(form, weights=path)
        path.unlink()
    assert not caplog.text
    ending = "npy" if form == "npy" else "bin"
    save(opened.folder / f"train_labels.{ending}", LABELS[:-1])
    assert not opened(form).weighted
    assert f"beside the tokens, and not read: {opened.folder}/train_labels.{ending}" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        ("x_text_document", "x_label_document"),
        ("x_text_document", "x_loss_mask_document"),
        ("x_input_ids_document", "x_attention_mask_document"),
        ("x-text", "x-role"),
    ],
)
def test_indexed_masks_of_megatron_are_never_ignored_or_read_as_tokens(tokens, mask, opened):
    write_megatron(opened.folder / mask, [[MASK[:3]], [MASK[3:]]], "uint8")
    for names in (tokens, "*"):
        with pytest.raises(ValueError, match=f"{mask}.bin, by its name, says of {tokens}.bin on w"):
            opened("megatron", tokens) and InPlace.megatron(opened.folder / names)
    (opened.folder / "y_text_document.bin").write_bytes(b"1")  # it has no mask
    corpus = opened("megatron", tokens, weights=opened.folder / f"{mask}.bin")
    assert weights_of(corpus) == WEIGHTS
    with pytest.raises(ValueError, match=f"{mask}.bin are masks or labels by their names; give th"):
        InPlace.megatron(opened.folder / mask)
    assert len(InPlace.megatron(opened.folder / mask, weights=())) == 2


@pytest.mark.parametrize("name", ["train_mask.bin", "mask_train.bin", "train_labels.bin"])
def test_a_glob_does_not_take_a_mask_for_tokens(name, opened, caplog):
    whole = opened("flat")
    array = TOKENS if "labels" in name else MASK
    path = save(opened.folder / name, array)
    with pytest.raises(ValueError, match=f"{name}, by its name, says of train.bin on which tokens"):
        InPlace.flat(opened.folder / "*train*.bin", **FLAT)
    corpus = InPlace.flat(opened.folder / "*train*.bin", **FLAT, weights=())
    assert corpus.fingerprint != whole.fingerprint or len(corpus) == len(whole)
    assert f"masks or labels by their names, and not read: {path}" in caplog.text


def test_files_that_are_no_masks_of_the_tokens_load_without_words(opened, caplog):
    folder = opened.folder
    for name in ("README.md", "make_mask.py", "loss.json", "labels.txt"):
        (folder / name).write_text(f"about the masks, in {name}")
    for name in ("meta.pkl", "vocab.bin", ".train_mask.bin.swp", "val_mask.bin", "val_labels.bin"):
        save(folder / name, MASK)
    for name in ("val.bin", "inputs.bin", "targets.bin", "train_more.bin", "other.npy"):
        save(folder / name, TOKENS)
    (folder.parent / "a_mask_of_another_run").mkdir()
    save(folder.parent / "a_mask_of_another_run" / "train.bin", MASK)
    for form in ("flat", "megatron"):
        opened(form)
    for name in ("train_more.bin", "inputs.bin", "targets.bin"):
        InPlace.flat(folder / name, **FLAT)
    assert not caplog.text
    with pytest.raises(ValueError, match=r"val_(mask|labels).bin, by its name, says of val.bin"):
        InPlace.flat(folder / "val.bin", **FLAT)


def test_tokens_whose_names_speak_of_labels_or_masks_load_without_words(tmp_path, caplog):
    for name in ("label", "mask_lm"):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(5):
            TOKENS.tofile(folder / f"{name}_{number:03}.bin")
        assert len(InPlace.flat(folder / "*.bin", **FLAT)) == 10
        assert len(InPlace.flat(folder / f"{name}_003.bin", **FLAT)) == 2
    assert not caplog.text


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (MASK * 255, "holds 255, which is not 0 or 1"),
        (MASK + ord("0"), "holds 48, which is not 0 or 1"),
        (MASK.astype(np.int64), "it has 48 bytes for 6 tokens"),
        (MASK[:4], "is cut short, or does not belong to .*: it has 4 bytes for 6 tokens"),
    ],
)
def test_masks_of_other_bytes_are_refused(mask, sentence, opened):
    path = save(opened.folder / "mine.raw", mask)
    for form in FORMATS:
        with pytest.raises(ValueError, match=f"{sentence}.*give a file with a byte for each token"):
            opened(form, weights=path)
    for kind in (np.int64, bool, np.float32):
        path = save(opened.folder / "mine.npy", MASK.astype(kind))
        assert weights_of(opened("flat", weights=path)) == WEIGHTS


def test_shards_have_their_own_masks(tmp_path):
    for number in range(12):
        TOKENS.tofile(tmp_path / f"token_ids_part_{number:02}.npy")
        MASK.tofile(tmp_path / f"labels_mask_part_{number:02}.npy")
    names = {"": "*.npy", "masks": "labels*", "one": "token_ids_part_07.npy"}
    for name in (names[""], names["one"]):
        first = "07" if "07" in name else "00"
        with pytest.raises(ValueError, match=rf"part_{first}.npy, by its name, .*part_{first}.npy"):
            InPlace.flat(tmp_path / name, **FLAT)
    corpus = InPlace.flat(tmp_path / "*.npy", **FLAT, weights=tmp_path / names["masks"])
    assert weights_of(corpus) == WEIGHTS * 12
    (tmp_path / "labels_mask_part_07.npy").unlink()
    assert not InPlace.flat(tmp_path / names["one"], **FLAT).weighted
