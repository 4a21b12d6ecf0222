"""Flags, parsed in this process as train.py parses them."""

import contextlib

from absl.flags import FLAGS

import train


@contextlib.contextmanager
def parsed():
    """Forgets the flags of a command, and the fields of its config, after the block."""
    known = {*FLAGS}
    try:
        yield
    finally:
        FLAGS.unparse_flags()
        for name in {*FLAGS} - known:
            delattr(FLAGS, name)


def parse(*words):
    """The config and the work directory that flags give."""
    with parsed():
        train.launch.parse_flags(["train.py", *words], train.DEFAULT_CONFIG)
        return FLAGS.config, FLAGS.workdir
