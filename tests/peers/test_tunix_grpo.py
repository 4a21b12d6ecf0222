"""The packer and the assembler of examples/tunix_grpo.py, with stand-ins for the types of Tunix."""

import collections
import dataclasses
import importlib.util
import sys
import types
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.processes import ROOT

PROMPT, ANSWER = 6, 24
MODULES = {
    "tunix.models.qwen2.model": ("ModelConfig", "Qwen2"),
    "tunix.rl.reshard": (),
    "tunix.rl.rl_cluster": (),
    "tunix.rl.utils": (),
    "tunix.rl.grpo.grpo_learner": ("GRPOConfig", "GRPOLearner"),
    "tunix.rl.rollout.base_rollout": ("RolloutConfig",),
}


@flax.struct.dataclass(frozen=True)
class TrainExample:
    """The fields that Tunix 0.1.7's has."""

    prompt_ids: Any
    prompt_mask: Any
    completion_ids: Any
    completion_mask: Any
    advantages: Any
    ref_per_token_logps: Any
    old_per_token_logps: Any
    segment_ids: Any = None
    segment_positions: Any = None
    sampler_is_weights: Any = None


def unpad_train_example(example):
    """As Tunix's: a dict for each row."""
    found = []
    for row in range(len(example.prompt_ids)):
        masks = example.prompt_mask, example.completion_mask
        prompt, answer = (int(mask[row].sum()) for mask in masks)
        found.append({"prompt_ids": np.asarray(example.prompt_ids)[row, PROMPT - prompt :]})
        for name in ("completion_ids", "completion_mask", "ref_per_token_logps"):
            found[-1][name] = np.asarray(getattr(example, name))[row, :answer]
        found[-1] |= {"advantages": example.advantages[row], "old_per_token_logps": None}
    return found


@pytest.fixture
def program(monkeypatch):
    """The module of the example, which imports stand-ins for Tunix."""
    for name, classes in MODULES.items():
        *parents, last = name.split(".")
        for depth in range(1, len(parents) + 1):
            parent = ".".join(parents[:depth])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(name)
        vars(module).update({each: type(each, (), {}) for each in classes})
        setattr(sys.modules[".".join(parents)], last, module)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["tunix.rl.grpo.grpo_learner"].TrainExample = TrainExample
    sys.modules["tunix.rl.utils"].unpad_train_example = unpad_train_example
    path = ROOT / "examples/tunix_grpo.py"
    spec = importlib.util.spec_from_file_location("tunix_grpo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_rollouts(count=16):
    """Rollouts without padding: no token of an answer occurs twice."""
    random = np.random.default_rng(0)
    found, first = [], 10
    for _ in range(count):
        prompt, answer = random.integers(1, PROMPT + 1), random.integers(2, ANSWER + 1)
        found.append(
            {
                "prompt_ids": random.integers(3, 9, prompt).astype(np.int32),
                "completion_ids": np.arange(first, first + answer, dtype=np.int32),
                "completion_mask": np.ones(answer, np.float32),
                "advantages": np.float32(random.normal()),
                "ref_per_token_logps": random.normal(-5, 0.1, answer).astype(np.float32),
            }
        )
        first += answer
    return found


def pad(rollouts, example_type):
    """Rollouts as Tunix's learner has them: prompts padded on the left, answers on the right."""

    def table(name, width, left=False):
        rows = np.zeros((len(rollouts), width), rollouts[0][name].dtype)
        for row, each in zip(rows, rollouts, strict=True):
            values = each[name]
            row[slice(width - len(values), None) if left else slice(len(values))] = values
        return jnp.asarray(rows)

    prompts = table("prompt_ids", PROMPT, left=True)
    return example_type(
        prompt_ids=prompts,
        prompt_mask=(prompts > 0).astype(np.int32),
        completion_ids=table("completion_ids", ANSWER),
        completion_mask=table("completion_mask", ANSWER),
        advantages=jnp.asarray([each["advantages"] for each in rollouts]),
        ref_per_token_logps=table("ref_per_token_logps", ANSWER),
        old_per_token_logps=None,
    )


def as_stream(program, rollouts, microbatches):
    """The microbatches of an update, as Tunix's queue gives them."""
    size = len(rollouts) // microbatches
    for first in range(0, len(rollouts), size):
        yield [pad(rollouts[first : first + size], program.TrainExample)]


def answers(example):
    """For the first token of each answer, its values, in its order."""
    names = "completion_ids", "completion_mask", "advantages", "ref_per_token_logps"
    ids, *fields = (np.asarray(getattr(example, name)) for name in names)
    return {
        int(ids[place]): [round(float(each[place]), 5) for each in fields]
        for place in zip(*np.nonzero(fields[0]), strict=True)
    }


def expected_answers(rollouts):
    return {
        int(token): [1.0, round(float(each["advantages"]), 5), round(float(logp), 5)]
        for each in rollouts
        for token, logp in zip(each["completion_ids"], each["ref_per_token_logps"], strict=True)
    }


def test_the_packer_gives_tunix_as_many_microbatches_as_an_update_has(program):
    rollouts = make_rollouts()
    pack_sequences = program.make_packer(4, 4)
    stream = [*as_stream(program, rollouts, 4), *as_stream(program, rollouts, 4)]
    found = [example for (example,) in pack_sequences(iter(stream), 64)]
    assert len(found) == 8
    values = {}
    for example in found[:4]:
        assert example.completion_ids.shape == example.segment_ids.shape == (4, 64)
        assert example.prompt_ids.shape == (4, 0)
        values |= answers(example)
        new = np.diff(np.asarray(example.segment_ids), prepend=0, axis=1) > 0
        positions = np.asarray(example.segment_positions)
        assert (positions[new] == 0).all()
        assert (np.diff(positions, axis=1)[~new[:, 1:]] <= 1).all()
    assert values == expected_answers(rollouts)
    tokens = np.array([float(example.completion_mask.sum()) for example in found[:4]])
    shares = np.array([float(example.share) for example in found[:4]])
    np.testing.assert_allclose(shares, 4 * tokens / tokens.sum(), rtol=1e-6)
    assert (tokens == 0).any()  # filled up
    with pytest.raises(
        ValueError, match=r"needs \d+ microbatches of 1x64, and Tunix takes a step after 4"
    ):
        list(program.make_packer(1, 4)(as_stream(program, rollouts, 4), 64))


# The fields that `RLTrainerPayload` and the results of Tunix's own assembler have.
PAYLOAD = """
    advantages prompt_ids prompt_mask completion_ids completion_mask segment_ids segment_positions
    ref_per_token_logps old_per_token_logps sampler_is_weights routed_experts returns old_values
    num_segments metadata
"""
Payload = dataclasses.make_dataclass("Payload", [(name, Any, None) for name in PAYLOAD.split()])
AssembledBatch = collections.namedtuple(
    "AssembledBatch", "payload is_final_batch padding_stats trajectory_ids", defaults=[()]
)
PaddingStats = collections.namedtuple(
    "PaddingStats", "row_valid_tokens row_num_sequences row_capacity"
)


def test_the_assembler_packs_an_update_when_it_is_whole(program, monkeypatch):
    for name in ("experimental", "experimental.orchestrator"):
        monkeypatch.setitem(sys.modules, f"tunix.{name}", types.ModuleType(name))
    module = types.ModuleType("batch_assembly")
    module.AssembledBatch, module.PaddingStats = AssembledBatch, PaddingStats
    monkeypatch.setitem(sys.modules, "tunix.experimental.orchestrator.batch_assembly", module)
    rollouts = make_rollouts(20)
    named = {f"traj_{number}": each for number, each in enumerate(rollouts)}
    items = [Payload(**each, metadata={"traj_id": name}) for name, each in named.items()]
    sizes = {
        name: len(each["prompt_ids"]) + len(each["completion_ids"]) for name, each in named.items()
    }
    assembler = program.Assembler(
        batch_size=2,
        num_generations=4,
        mini_batch_size=2,
        max_packed_len=64,
        pad_id=9,
        max_segments_per_packed_row=4,
        start_batch_index=5,
    )
    assert assembler.rollouts_per_optimizer_update == 8
    assert list(assembler.feed(items[:6])) == []
    updates = [list(assembler.feed(items[6:12])), list(assembler.feed(items[12:18]))]
    updates.append(list(assembler.flush()))
    assert list(assembler.flush()) == []
    numbers = []
    for first, update in zip((0, 8, 16), updates, strict=True):
        assert [each.is_final_batch for each in update] == [False] * (len(update) - 1) + [True]
        values, names = {}, []
        for payload, _, fill, trajectories in update:
            assert payload.completion_ids.shape == (2, 64)
            assert payload.num_segments == 5
            assert payload.metadata["trajectory_ids"] == trajectories
            real = payload.segment_ids > 0
            assert (payload.completion_ids[~real] == 9).all()
            assert fill.row_valid_tokens.tolist() == real.sum(axis=1).tolist()
            assert fill.row_num_sequences.tolist() == payload.segment_ids.max(axis=1).tolist()
            assert fill.row_valid_tokens.sum() == sum(sizes[each] for each in trajectories)
            values |= answers(payload)
            names += trajectories
            numbers.append(payload.metadata["batch_index"])
        whole = range(first, min(first + 8, 18))
        assert sorted(names) == sorted([*named][whole.start : whole.stop])
        assert values == expected_answers(rollouts[first : first + 8][: len(whole)])
    assert numbers == list(range(5, 5 + len(numbers)))
    assembler.feed(items[:3])
    assembler.reset(start_batch_index=0)
    assert list(assembler.flush()) == []
    assert next(assembler.feed(items[:8])).payload.metadata["batch_index"] == 0
