"""Flags, parsed in this process as train.py parses them."""

from absl.flags import FLAGS

from trainer import launch


def parse(*words):
    """The config and the work directory that flags give; they are forgotten after the call."""
    known = {*FLAGS}
    try:
        launch.parse_flags(["train.py", *words])
        return FLAGS.config, FLAGS.workdir
    finally:
        FLAGS.unparse_flags()
        for name in {*FLAGS} - known:
            delattr(FLAGS, name)
