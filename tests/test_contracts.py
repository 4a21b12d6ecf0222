"""The contracts between parts of the package name every file of the folders that they are about."""

import tomllib

import pytest

from tests.processes import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
CONTRACTS = SETTINGS["importlinter"]["contracts"]

# By folder, the modules that are no adapters: the protocol of adapters, and what all of them use.
SHARED = {
    "text.sources": {"content", "files", "source"},
    "text.templates": {"encoding", "regions", "sandbox", "slots", "template"},
    "text.tokenizers": {"file_tokenizer", "markup", "tokenizer"},
}


def modules_of(folder):
    return {path.stem for path in (ROOT / "pipeline").joinpath(*folder.split(".")).glob("[!_]*.py")}


def named(folder, key):
    """The modules of a folder that contracts have under a key."""
    names = [name.rpartition(".") for each in CONTRACTS for name in each.get(key, ())]
    return {module for place, _, module in names if place == f"pipeline.{folder}"}


@pytest.mark.parametrize("folder", SHARED)
def test_every_adapter_is_known_by_the_registry_alone_and_imports_its_protocol(folder):
    adapters = modules_of(folder) - SHARED[folder]
    assert SHARED[folder] < modules_of(folder)
    for key in ("protected_modules", "source_modules"):
        assert adapters <= named(folder, key), key
