"""The package as another project has it: installed into its environment, without the repository."""

import functools
import os
import pathlib
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv

import pytest

import pipeline
from tests.processes import COMPILE_QUICKLY, ROOT

run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a new environment with the package installed, and this one's dependencies.

    They are found by a path file, which does not read the path files of this environment: so the
    package is the installed one even if this environment has it in place.
    """
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin/python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = pathlib.Path(subprocess.check_output([python, "-c", asked], text=True).strip())
    paths = {*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    source = tmp_path_factory.mktemp("source")  # building writes into the tree
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    excluded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pipeline", source / "pipeline", ignore=excluded)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", packages, source]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.fixture
def printed(python, tmp_path):
    """The lines that a piece of code prints there."""

    def lines_of(code):
        out = subprocess.check_output([python, "-I", "-c", code], cwd=tmp_path, text=True)
        return out.splitlines()

    return lines_of


def test_the_installed_package_is_pipeline_alone(printed, python):
    typed, place, others = printed(
        "import importlib.util, pathlib, pipeline, pipeline.report, pipeline.text.sources.source;"
        "print(pathlib.Path(pipeline.__file__).with_name('py.typed').exists());"
        "print(pathlib.Path(pipeline.__file__).parent.parent);"
        "print([name for name in ('models', 'configs', 'tests') if importlib.util.find_spec(name)])"
    )
    assert (typed, others) == ("True", "[]")
    assert pathlib.Path(place) != ROOT
    assert str(python.parent.parent) in place


def test_the_console_command_is_installed(printed):
    said = printed(
        "from importlib.metadata import entry_points;"
        "(script,) = entry_points(group='console_scripts', name='lockstep');"
        "script.load()(['--version'])"
    )
    assert said == [f"lockstep {pipeline.__version__}"]


def test_planning_there_needs_numpy_only(printed):
    said = printed(
        "import sys, pipeline; pipeline.Plan([3, 4, 5], [pipeline.Bucket(2, 8)]).batch(0);"
        "print(sorted({'jax', 'grain', 'pyarrow', 'flax'} & set(sys.modules)))"
    )
    assert said == ["[]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["mypy", "--ignore-missing-imports", "--cache-dir=/dev/null", "--python-executable"],
        ["basedpyright", "--level", "error", "--pythonpath"],
    ],
    ids=lambda command: command[0],
)
def test_a_project_has_the_types(command, python, tmp_path):
    lines = [
        "import pipeline",
        "for batch in pipeline.load('corpus', tokens_per_batch=4096, packing='best_fit'):",
        "    batch['inputs'].sum()",
        "    batch['input']",
        "pipeline.load('corpus', tokens_per_batch=4096, max_lenght=512)",
    ]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    settings = [
        "[tool.pyright]",
        "typeCheckingMode = 'standard'",
        "[[tool.mypy.overrides]]",  # reading JAX takes most of a minute
        "module = 'jax.*'",
        "follow_imports = 'skip'",
    ]
    (tmp_path / "pyproject.toml").write_text("\n".join(settings) + "\n")
    program = pathlib.Path(sys.executable).parent / command[0]
    done = run([program, *command[1:], python, "user.py"], cwd=tmp_path)
    found = re.findall(r"user\.py:(\d+):.*error: ", done.stdout)
    assert found == ["4", "5"], done.stdout + done.stderr


@pytest.mark.slow
def test_a_project_trains_and_goes_on(python, tmp_path):
    shutil.copy(ROOT / "examples/linen.py", tmp_path)
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {COMPILE_QUICKLY}"}

    def train(directory, steps):
        """The loss of each step of the example, on two devices."""
        command = [python, "linen.py", f"--workdir={tmp_path / directory}", f"--steps={steps}"]
        done = run(command, cwd=tmp_path, env=own)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"^step (\d+) .* loss (\S+)$", done.stdout, re.M)
        return {int(step): float(loss) for step, loss in found}

    whole = train("whole", 8)
    assert list(whole) == list(range(8))
    assert whole[7] < whole[0]
    # Stopped and gone on with, it has the same losses: parameters and moments came back.
    assert train("parts", 4) | train("parts", 8) == whole
