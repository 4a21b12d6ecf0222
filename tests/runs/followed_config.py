"""The smallest run of a mixture that grows: a library, what is prepared, and what others write."""

from ml_collections import ConfigDict

from tests.runs import mixture_config


def get_config() -> ConfigDict:
    """Needs the text in the file that TINY_TEXT names."""
    config = mixture_config.get_config()
    library, prepared = (config.sources[name].to_dict() for name in ("first", "second"))
    prepared["follow"] = True
    written = {**prepared, "files": "", "wait_seconds": 60.0}
    config.sources = ConfigDict({"library": library, "prepared": prepared, "written": written})
    config.mixture.weights = ((0, {"library": 1, "prepared": 2, "written": 3}),)
    config.batches.window = 20
    return config
