"""Lint, format and import layers, so that one command checks everything; types: test_types.py."""

import pathlib
import sys

import pytest

from tests.processes import call

BIN = pathlib.Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["lint-imports"]],
    ids=lambda command: " ".join(command),
)
def test_the_code_passes(command):
    done = call(BIN / command[0], *command[1:])
    assert done.returncode == 0, done.stdout + done.stderr
