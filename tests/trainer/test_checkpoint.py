"""Checkpoints of a run, and damaged ones: a sentence that says where to resume."""

import re
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pipeline.errors import NotFinite
from trainer.checkpoint import Checkpoints


def state_after(step):
    weights = jax.random.normal(jax.random.key(step), (20, 50))  # too large for orbax to inline
    return {"step": jnp.int32(step), "weights": weights}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints of the steps 4, 8 and 12."""
    place = tmp_path_factory.mktemp("checkpoints") / "three"
    with Checkpoints(place, keep=5) as checkpoints:
        for step in (4, 8, 12):
            checkpoints.save(step, state_after(step), data={"step": step}, run={"name": "a"})
    return place


@pytest.fixture
def directory(three, tmp_path):
    return shutil.copytree(three, tmp_path / "copy")


def restore(directory, like=None):
    with Checkpoints(directory) as checkpoints:
        saved = checkpoints.read()
        return checkpoints.restore_state(saved.step, like or state_after(0)), saved.data


def test_a_save_that_has_begun_ends_before_a_program_that_can_do_no_more(tmp_path):
    def train():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(4, state_after(4), data={"step": 4})
            raise NotFinite("what ends it")

    with pytest.raises(NotFinite):
        train()
    assert (tmp_path / "4" / "checksums").is_dir()  # it is renamed to this when it is whole


def test_a_whole_checkpoint_gives_what_was_saved(directory):
    state, data = restore(directory)
    assert (int(state["step"]), data) == (12, {"step": 12})
    assert (state["weights"] == state_after(12)["weights"]).all()
    with Checkpoints(directory) as checkpoints:
        assert checkpoints.read(8) == (8, {"step": 8}, {"name": "a"})
        assert int(checkpoints.restore_state(4, state_after(0))["step"]) == 4
        part = checkpoints.restore_part(8, {"weights": state_after(0)["weights"]})
        assert [*part] == ["weights"]
        assert (part["weights"] == state_after(8)["weights"]).all()
    cast = {**state_after(0), "weights": jnp.zeros((20, 50), jnp.bfloat16)}
    assert restore(directory, cast)[0]["weights"].dtype == jnp.bfloat16


def test_without_a_checkpoint_there_is_none_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.latest is None
    assert checkpoints.read() == (0, {}, {})


def largest(folder):
    return max(folder.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)


DAMAGES = {
    "no data": lambda step: (step / "data/metadata").unlink(),
    "half of data": lambda step: (step / "data/metadata").write_text('{"step'),
    "no data state": lambda step: (step / "data/metadata").write_text("[7]"),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no manifest": lambda step: (step / "state/manifest.ocdbt").unlink(),
    "half of a table": lambda step: largest(step / "state/d").write_bytes(b"x"),
    "no array": lambda step: [
        path.unlink() for path in (step / "state/ocdbt.process_0/d").iterdir()
    ],
    "nothing at all": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_step_to_go_on_from(directory, damage):
    DAMAGES[damage](directory / "12")
    with pytest.raises(ValueError) as error:
        restore(directory)
    text = str(error.value)
    assert re.match(rf"{re.escape(str(directory / '12'))} (cannot be restored|is damaged): ", text)
    assert text.endswith("delete that directory to resume from step 8")
    assert "\n" not in text
    # The advice is right.
    shutil.rmtree(directory / "12")
    assert int(restore(directory)[0]["step"]) == 8


def test_a_stray_directory_is_named_and_so_is_each_damaged_step_after_it(directory):
    (directory / "99").mkdir()
    for step in (4, 8):
        (directory / f"{step}/run/metadata").write_text("{")
    (directory / "12/data/metadata").unlink()
    for step, advice in ((99, "resume from step 12"), (12, "resume from step 8"), (8, "resume")):
        with pytest.raises(ValueError, match=rf"/{step} cannot be restored.* to {advice}"):
            restore(directory)
        shutil.rmtree(directory / f"{step}")
    with pytest.raises(ValueError, match=r"/4 cannot be .*delete that directory to start again"):
        restore(directory)


@pytest.mark.parametrize(
    "like",
    [
        {"step": jnp.int32(0)},
        {"step": jnp.int32(0), "weights": jnp.zeros((20, 51))},
        {"step": jnp.int32(0), "other": jnp.zeros((20, 50))},
    ],
    ids=["less", "shape", "name"],
)
def test_for_a_state_of_another_model_the_first_advice_is_to_use_its_own(directory, like):
    with pytest.raises(ValueError, match=r"/12 cannot be restored: .*\. If the model or the optim"):
        restore(directory, like)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        PermissionError("not yours"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_what_is_no_damage_is_not_advised_to_delete(directory, monkeypatch, error):
    checkpoints = Checkpoints(directory)
    monkeypatch.setattr(checkpoints._manager, "restore", mock.Mock(side_effect=error))
    with pytest.raises(type(error)) as raised:
        checkpoints.read(12)
    assert "delete" not in str(raised.value)
    assert raised.value is error


def test_a_data_state_of_another_step_is_damage(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(15, state_after(15), data={"step": 7})
        checkpoints._manager.wait_until_finished()
        with pytest.raises(ValueError, match=r"15 is damaged: its data state is that of step 7;"):
            checkpoints.read(15)


@pytest.mark.parametrize("what", ["state", "json"])
def test_a_checkpoint_whose_content_is_not_what_was_saved_is_damage(directory, monkeypatch, what):
    # A bit that flips in an array on disk changes a number, and orbax does not notice.
    def other(self, step, **items):
        content = dict(whole(self, step, **items))
        if what == "state" and "state" in content:
            weights = content["state"]["weights"]
            content["state"]["weights"] = weights.at[3, 7].set(jnp.nextafter(weights[3, 7], 9))
        elif what == "json" and "run" in content and step == 12:
            content["run"] = {"name": "b"}
        return content

    whole = Checkpoints._restore
    monkeypatch.setattr(Checkpoints, "_restore", other)
    seen = r"its array \['weights'\] is not" if what == "state" else "its JSON is not"
    with pytest.raises(ValueError, match=rf"12 is damaged: {seen} what was saved.* step 8"):
        restore(directory)


def test_only_checkpoints_are_deleted_and_a_save_that_orbax_leaves_out_is_an_error(tmp_path):
    for name in ("5", "best", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("mine")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (6, 7):
            checkpoints.save(step, {"a": jnp.arange(3.0)}, data={"step": step})
        with pytest.raises(RuntimeError, match="holds step 7, and step 4 is not later; resume"):
            checkpoints.save(4, {"a": jnp.arange(3.0)}, data={"step": 4})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "7", "best", "notes"]
    assert all((tmp_path / name / "x").read_text() == "mine" for name in ("5", "best", "notes"))
