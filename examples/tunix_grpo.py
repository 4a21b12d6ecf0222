"""GRPO with Tunix's own learner, on rows that Lockstep packs.

    pip install lockstep-pipeline google-tunix
    python examples/tunix_grpo.py

A tiny Qwen learns to repeat the last letter of its prompt. Tunix samples, scores and trains;
`pack_sequences`, which it calls between, is replaced. Copy this file, and load your model, your
prompts and your reward in it. Comments that begin with "Lockstep:" say what the line below does.

Tunix divides the loss of each microbatch by that microbatch's own tokens, and takes the mean of
these means (tunix#1662). So a token counts for more in a microbatch with fewer tokens, and the
gradients of an update depend on how its rows were dealt. `Learner` multiplies each microbatch's
loss by its share of the update's tokens, which removes the dependence.

`Assembler` is the same packer for the protocol of later versions, whose trainer divides once for an
update. Tried with google-tunix 0.1.7; `Assembler` with dataclasses of the same fields.

The rollouts of a prompt do not share it in a row, as groups do in examples/rollouts.py. For a
packed row, Tunix gives its model segment ids and positions but no mask, so the rollouts of a group
would see one another; and it takes the target of each column from the next one, which is wrong in a
group.
"""

import argparse
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.rl import reshard, rl_cluster
from tunix.rl import utils as rl_utils
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rollout.base_rollout import RolloutConfig

import pipeline
from pipeline.corpus.tasks import INPUTS

LETTERS = "abcdef"
PROMPT, ANSWER = 8, 16  # the most tokens of each
GENERATIONS = 8  # rollouts of each prompt
# Fields that Tunix packs if rollouts have them: a number, or one for each token.
OPTIONAL = (
    "ref_per_token_logps",
    "old_per_token_logps",
    "returns",
    "old_values",
    "sampler_is_weights",
)


def spread(value, prompt, answer):
    """A number for each token, 0 in the prompt; from one number, or one for each token."""
    value = np.ravel(np.asarray(value, np.float32))
    if len(value) == prompt + answer:
        value = value[prompt:]
    return np.append(np.zeros(prompt, np.float32), np.broadcast_to(value, answer))


def pack_rollouts(rollouts, bucket, *, pad_id=0, **options):
    """Batches of rollouts, which are dicts of Tunix's fields without padding.

    Args:
        rollouts: of one update. `prompt_ids`, `completion_ids`, `completion_mask`, `advantages`,
            and any of `OPTIONAL` that all of them have.
        bucket: the shape of batches, `[rows, tokens]`.
        pad_id: the id in padding.
        options: of `pipeline.pack`, such as `max_segments`.

    Yields:
        The plan of each batch, and its fields `[rows, tokens]`, by Tunix's names.
    """
    names = ["completion_mask", "advantages"]
    names += [name for name in OPTIONAL if all(each.get(name) is not None for each in rollouts)]
    sizes = [(len(each["prompt_ids"]), len(each["completion_ids"])) for each in rollouts]
    columns = {
        name: [spread(each[name], *two) for each, two in zip(rollouts, sizes, strict=True)]
        for name in names
    }
    ids = [np.append(each["prompt_ids"], each["completion_ids"]) for each in rollouts]
    # Lockstep: values that lie where their token is an input, as Tunix expects them.
    features = {name: pipeline.Feature("inputs", dtype="float32") for name in names}
    examples = pipeline.Examples({"tokens": ids} | columns, features=features, task=INPUTS)
    # Lockstep: the fewest rows, dealt so that all devices have equal work.
    for planned, batch in pipeline.pack(examples, [bucket], **options):
        fields = dict(batch)
        segment_ids = batch["inputs_segment_ids"]
        yield (
            planned,
            {
                "completion_ids": jnp.where(segment_ids > 0, batch["inputs"], pad_id),
                "segment_ids": segment_ids,
                "segment_positions": batch["inputs_positions"],
                **{name: fields[name] for name in names},
            },
        )


@struct.dataclass(frozen=True)
class PackedExample(TrainExample):
    """A microbatch `[rows, tokens]`, and what to multiply its mean loss by."""

    share: jax.Array | float = 1.0


def make_packer(rows, microbatches, *, mean_of="tokens", **options):
    """Returns a `pack_sequences` for Tunix that makes `microbatches` in each update.

    The loss of an update is the mean over its tokens, or with `mean_of="rollouts"` the mean of each
    rollout's mean, which Tunix without packing calls "sequence-mean-token-mean".

    Tunix takes a step after this many microbatches, whatever they hold. Its own packer makes as
    many rows as it needs, so steps fall inside updates. This one adds empty microbatches.
    """

    def pack_sequences(item_iterator, max_token_budget, pad_id=0):
        """Microbatches `[rows, max_token_budget]` of each update, as lists of one."""
        bucket = pipeline.Bucket(rows, max_token_budget)
        while update := list(itertools.islice(item_iterator, microbatches)):
            examples = itertools.chain.from_iterable(update)
            rollouts = [each for one in examples for each in rl_utils.unpad_train_example(one)]
            if mean_of == "rollouts":
                for each in rollouts:
                    mask = each["completion_mask"]
                    each["completion_mask"] = mask / max(mask.sum(), 1)
            batches = [
                batch for _, batch in pack_rollouts(rollouts, bucket, pad_id=pad_id, **options)
            ]
            if len(batches) > microbatches:
                raise ValueError(
                    f"an update needs {len(batches)} microbatches of {bucket}, and Tunix takes a "
                    f"step after {microbatches}; give more rows"
                )
            missing = microbatches - len(batches)
            batches += [jax.tree.map(jnp.zeros_like, batches[0])] * missing
            weights = [float(batch["completion_mask"].sum()) for batch in batches]
            for batch, own in zip(batches, weights, strict=True):
                optional = {"ref_per_token_logps": None, "old_per_token_logps": None} | batch
                yield [
                    PackedExample(
                        prompt_ids=jnp.zeros((rows, 0), jnp.int32),
                        prompt_mask=jnp.zeros((rows, 0), jnp.int32),
                        share=jnp.float32(own * microbatches / max(sum(weights), 1e-9)),
                        **optional,
                    )
                ]

    return pack_sequences


class Learner(GRPOLearner):
    """A GRPO learner whose gradients do not depend on how an update is packed.

    Give its config loss_agg_mode="token-mean". For a mean of rollouts, too, since `make_packer`
    weights their tokens: Tunix's other modes take a row for a rollout.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        trainer = self.rl_cluster.actor_trainer
        mean_loss = trainer.loss_fn

        def shared_loss(model, train_example, algo_config):
            loss, metrics = mean_loss(model, train_example, algo_config)
            return loss * getattr(train_example, "share", 1.0), metrics

        trainer.with_loss_fn(shared_loss, has_aux=True)


class Assembler:
    """A `BatchAssembler` of Tunix's later versions, which packs an update when it is complete.

    Its trainer adds up the sums of losses and divides once for an update, so it needs no shares.
    Routed experts and lineage are not supported.

    Args:
        batch_size: rows of a microbatch.
        num_generations: rollouts of each prompt.
        mini_batch_size: prompts of an update.
        max_packed_len: tokens of a row.
        pad_id: the id in padding.
        max_segments_per_packed_row: the most rollouts in a row; None: no limit.
        start_batch_index: the number of the first microbatch.
    """

    def __init__(
        self,
        *,
        batch_size,
        num_generations,
        mini_batch_size,
        max_packed_len=8192,
        pad_id=0,
        max_segments_per_packed_row=None,
        start_batch_index=0,
    ):
        self.bucket = pipeline.Bucket(batch_size, max_packed_len)
        self.num_generations, self.mini_batch_size = num_generations, mini_batch_size
        self.pad_id, self.max_segments = pad_id, max_segments_per_packed_row
        self.batch_index, self._waiting = start_batch_index, []

    @property
    def rollouts_per_optimizer_update(self):
        """Rollouts of an update."""
        return self.mini_batch_size * self.num_generations

    def feed(self, items):
        """Takes rollouts; an iterator of the microbatches of each update that they complete."""
        self._waiting += items
        size = self.rollouts_per_optimizer_update
        whole = len(self._waiting) // size * size
        updates = [self._waiting[first : first + size] for first in range(0, whole, size)]
        self._waiting = self._waiting[whole:]
        return itertools.chain.from_iterable(map(self._assemble, updates))

    def flush(self):
        """An iterator of the microbatches of the rollouts that wait for their update."""
        waiting, self._waiting = self._waiting, []
        return self._assemble(waiting) if waiting else iter(())

    def reset(self, *, start_batch_index=None):
        """Drops the rollouts that wait; numbers microbatches from `start_batch_index`, if given."""
        self._waiting = []
        if start_batch_index is not None:
            self.batch_index = start_batch_index

    def _assemble(self, items):
        # Later than 0.1.7.
        from tunix.experimental.orchestrator.batch_assembly import AssembledBatch, PaddingStats

        rows, tokens = self.bucket.rows, self.bucket.length
        names = [field.name for field in dataclasses.fields(items[0])]
        rollouts = [{name: getattr(item, name) for name in names} for item in items]
        missing = {"prompt_ids": np.zeros(0, np.int32), "completion_mask": 1.0}
        for each in rollouts:
            each |= {name: value for name, value in missing.items() if each[name] is None}
        packed = pack_rollouts(
            rollouts, self.bucket, pad_id=self.pad_id, max_segments=self.max_segments
        )
        left = len(items)
        for planned, batch in packed:
            row, example, _, size = planned.segments[:, :4].T
            left -= len(row)
            trajectories = tuple(
                str((items[number].metadata or {}).get("traj_id", "")) for number in example
            )
            payload = type(items[0])(
                prompt_ids=np.zeros((rows, 0), np.int32),
                prompt_mask=np.zeros((rows, 0), np.float32),
                num_segments=(self.max_segments or tokens) + 1,
                metadata={"trajectory_ids": trajectories, "batch_index": self.batch_index},
                **jax.tree.map(np.asarray, batch),
            )
            self.batch_index += 1
            fill = PaddingStats(
                row_valid_tokens=np.bincount(row, size, rows).astype(np.int64),
                row_num_sequences=np.bincount(row, minlength=rows),
                row_capacity=tokens,
            )
            yield AssembledBatch(payload, left == 0, fill, trajectories)


class Tokenizer:
    """A token for each letter, after the marks of padding, beginning and end."""

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def encode(self, text):
        return [LETTERS.index(letter) + 3 for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[each - 3] if each > 2 else "." for each in ids)


class CausalQwen(Qwen2):
    """A Qwen that sees no later token, also in packed rows.

    Tunix 0.1.7 gives packed rows no mask, and leaves order to flash attention. Without it, a token
    would see those that follow in its segment.
    """

    def __call__(self, input_tokens, positions, cache, attention_mask, **options):
        ids = options.get("segment_ids")
        if attention_mask is None and ids is not None:
            before = positions[:, :, None] >= positions[:, None, :]
            attention_mask = before & (ids[:, :, None] == ids[:, None, :])
        return super().__call__(input_tokens, positions, cache, attention_mask, **options)


def make_model(mesh):
    """A tiny Qwen; for a real one, load a checkpoint here."""
    heads = {"num_heads": 2, "head_dim": 16, "num_kv_heads": 2}
    sizes = {"num_layers": 1, "vocab_size": len(LETTERS) + 3, "embed_dim": 32, "hidden_dim": 64}
    config = ModelConfig(**sizes, **heads, rope_theta=10_000, norm_eps=1e-5)
    return reshard.reshard_model_to_mesh(CausalQwen(config, rngs=nnx.Rngs(0)), mesh)


def make_prompts(updates, count):
    """For each update, `count` prompts of 2 to 7 letters."""
    random = np.random.default_rng(0)
    for _ in range(updates):
        sizes = random.integers(2, PROMPT, count)
        yield {"prompts": ["".join(random.choice([*LETTERS], size)) for size in sizes]}


def reward(prompts, completions, **_):
    """The share of the prompt's last letter in the longest possible answer."""
    return [
        answer.count(prompt[-1]) / ANSWER
        for prompt, answer in zip(prompts, completions, strict=True)
    ]


def train(updates, prompts=8, microbatches=2, rows=8, tokens=128):
    """Trains, and prints the mean reward of each update; returns the model.

    Args:
        updates: steps of the optimizer.
        prompts: of an update.
        microbatches: of an update, `[rows, tokens]` each.
        rows: of a microbatch.
        tokens: of a row.
    """
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=auto)
    role = rl_cluster.Role
    rollout = RolloutConfig(
        max_tokens_to_generate=ANSWER,
        max_prompt_length=PROMPT,
        kv_cache_size=PROMPT + ANSWER + 1,
        temperature=1.0,
    )
    count = itertools.count(1)

    def reward_and_print(**given):
        """Rewards; sets another seed for the next rollouts, since Tunix's sampler has only one."""
        rewards = reward(**given)
        rollout.seed = next(count)
        print("update", rollout.seed - 1, "reward", round(float(np.mean(rewards)), 3))
        return rewards

    with mesh:  # where Tunix looks for its mesh
        cluster = rl_cluster.RLCluster(
            actor=make_model(mesh),
            reference=make_model(mesh),
            tokenizer=Tokenizer(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
                rollout_engine="vanilla",
                offload_to_cpu=False,
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adam(1e-2),
                    eval_every_n_steps=updates,
                    max_steps=updates,
                    mini_batch_size=prompts,
                    train_micro_batch_size=prompts // microbatches,
                    rollout_micro_batch_size=prompts,
                    compute_logps_micro_batch_size=prompts,
                    max_seq_token_per_tpu=tokens,
                ),
                rollout_config=rollout,
            ),
        )
        # Lockstep: Tunix's learner calls this between rollout and training.
        rl_utils.pack_sequences = make_packer(rows, microbatches, sharding=mesh)
        config = GRPOConfig(num_generations=GENERATIONS, beta=0.01, loss_agg_mode="token-mean")
        learner = Learner(rl_cluster=cluster, algo_config=config, reward_fns=reward_and_print)
        learner.train(make_prompts(updates, prompts))
    return cluster.actor_trainer.model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    train(parser.parse_args().updates)
