"""A copy of train.py with a model in Linen and another optimizer: only what builds them changes."""

import sys

from tests.processes import ROOT, call
from tests.runs.runs import steps, summary

BUILDERS = '''
class Bigram(linen.Module):
    """The next token from this one, and nothing else."""

    vocab_size: int

    @linen.compact
    def __call__(self, tokens):
        return linen.Dense(self.vocab_size)(linen.Embed(self.vocab_size, 16)(tokens))


def make_model(config, corpus):
    model = Bigram(corpus.vocab_size)

    def init(key):
        return model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (losses * batch["loss_weights"]).sum(), batch["loss_weights"].sum()

    return init, loss, lambda planned: 0.0


def make_optimizer(config):
    return optax.adafactor(0.05), optax.constant_schedule(0.05)


'''


def test_a_copy_trains_another_model_and_goes_on(text, tmp_path):
    whole = (ROOT / "train.py").read_text()
    before, rest = whole.split("def make_model(", 1)
    _, after = rest.split("# ---- ", 1)
    before = before.replace(
        "from flax import nnx\n", "import jax.numpy as jnp\nfrom flax import linen\n"
    )
    copy = tmp_path / "linen_train.py"
    copy.write_text(before + BUILDERS.lstrip() + "# ---- " + after)
    for number in (6, 10):
        command = [sys.executable, copy, "--config=tests/runs/tiny_config.py", "--config.keep=1"]
        command += [f"--workdir={tmp_path / 'run'}", f"--config.steps={number}"]
        command += ["--config.batches.tokens_per_batch=512"]
        done = call(*command, TINY_TEXT=str(text))
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed: step 6 of 10" in done.stdout
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(10))
    values = summary(tmp_path / "run")
    assert values["eval_loss_last"] < values["eval_loss_first"]
    assert values["compiles_after_start"] == 0
