"""The package as another project has it: installed into its environment, without the repository."""

import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pipeline
from tests.pages import README, SNIPPETS
from tests.processes import COMPILE_QUICKLY, ROOT

run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the package is built from, since building writes into the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    excluded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pipeline", source / "pipeline", ignore=excluded)
    return source


@pytest.fixture(scope="module")
def python(source, tmp_path_factory):
    """The Python of a new environment that has what `pip install` of the package alone installs.

    Its packages are the package, and links to the files of those that it needs.
    """
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    asked = [place / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = pathlib.Path(subprocess.check_output(asked, text=True).strip())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = run([sys.executable, "-m", "pip", "install", *options, "--target", packages, source])
    assert done.returncode == 0, done.stdout + done.stderr
    here = {*site.getsitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))}
    by_name = {}
    for each in importlib.metadata.distributions(path=[str(packages), *sorted(here)]):
        by_name.setdefault(canonicalize_name(each.metadata["Name"]), each)
    todo, done = [("lockstep-pipeline", "")], set()
    while todo:
        name, extra = wanted = todo.pop()
        for requirement in map(Requirement, by_name[name].requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                names = itertools.product(
                    [canonicalize_name(requirement.name)], ["", *requirement.extras]
                )
                todo += [each for each in names if each not in done]
        done.add(wanted)
    for name in {name for name, _ in done} - {"lockstep-pipeline"}:
        for file in by_name[name].files:
            if ".." not in file.parts:  # a script
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                (packages / file).symlink_to(file.locate())
    return asked[0]


@pytest.fixture
def printed(python, tmp_path):
    """The lines that a piece of code prints there."""

    def lines_of(code):
        out = subprocess.check_output([python, "-I", "-c", code], cwd=tmp_path, text=True)
        return out.splitlines()

    return lines_of


def test_the_installed_package_is_pipeline_alone_with_its_command(printed, python):
    typed, place, others, version = printed(
        "import importlib.util, pathlib, pipeline, pipeline.report, pipeline.text.sources.source;"
        "print(pathlib.Path(pipeline.__file__).with_name('py.typed').exists());"
        "print(pathlib.Path(pipeline.__file__).parent.parent);"
        "print([each for each in ('models', 'configs', 'tests') if importlib.util.find_spec(each)])"
        "\nfrom importlib.metadata import entry_points;"
        "(script,) = entry_points(group='console_scripts', name='lockstep');"
        "script.load()(['--version'])"
    )
    assert version == f"lockstep {pipeline.__version__}"
    assert (typed, others) == ("True", "[]")
    assert pathlib.Path(place) != ROOT
    assert str(python.parent.parent) in place


def test_planning_there_needs_numpy_only(printed):
    said = printed(
        "import sys, pipeline; pipeline.Plan([3, 4, 5], [pipeline.Bucket(2, 8)]).batch(0);"
        "print(sorted({'jax', 'grain', 'pyarrow', 'flax'} & set(sys.modules)))"
    )
    assert said == ["[]"]


# The README's commands that need no training, in one process, as each imports JAX.
WITHOUT_TRAINING = """
import importlib, pathlib, pkgutil, sys
from pipeline.cli.commands import main
import pipeline

for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

if __name__ == "__main__":
    for command in COMMANDS:
        print(*command, flush=True)
        assert main(command) == 0
    (batch,) = pipeline.load("zen", tokens_per_batch=8192, max_length=64, num_epochs=1)
    assert batch["loss_weights"].sum() > 0
    exec(pathlib.Path("snippet.py").read_text())
"""


def test_what_the_readme_shows_without_training_needs_no_extra(python, tmp_path):
    (tmp_path / "zen.txt").write_text("pack the rows\n" * 500 + "of every length\n")
    (prepare,) = re.findall(r"^lockstep (prepare) (.+) (--into) (\w+)$", README.read_text(), re.M)
    commands = [[*prepare], ["report", "zen", "--html", "report.html"]]
    commands += [[name, "zen"] for name in ("report", "buckets", "show", "check")]
    commands += [["show", "zen", "--svg", "batch.svg"]]
    (snippet,) = (each for each in SNIPPETS if "lengths = np.array([300, 200" in each.content)
    (tmp_path / "snippet.py").write_text(snippet.content)
    (tmp_path / "all.py").write_text(WITHOUT_TRAINING.replace("COMMANDS", repr(commands)))
    said = run([python, "-m", "pipeline", "--version"], cwd=tmp_path)
    assert said.stdout == f"lockstep {pipeline.__version__}\n", said.stderr
    done = run([python, "all.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("flax", "optax", "orbax", "tensorflow_datasets", "sentencepiece", "pytest"):
        assert "ModuleNotFoundError" in run([python, "-c", f"import {name}"]).stderr


def test_the_citation_names_the_version_of_the_package():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_ci_file_calls_parts_that_there_are():
    named = re.findall(r"parts: ([\w ]+)", (ROOT / ".github/workflows/ci.yml").read_text())
    known = re.search(r"\$\{\*:-([\w ]+)\}", (ROOT / ".ci/run").read_text())[1].split()
    assert {part for parts in named for part in parts.split()} == {*known}


@pytest.mark.slow
def test_all_extras_can_be_installed_together(source):
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    extras = {*project["optional-dependencies"]} - {"cuda12", "cuda13", "tpu"}  # one of the three
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    wanted = f"{source}[{','.join(sorted(extras))}]"
    done = run([sys.executable, "-m", "pip", "install", *options, wanted])
    assert done.returncode == 0, done.stdout + done.stderr
    names = [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]]
    assert {"apache-beam", "sentencepiece", "ray"} <= {*names}
    assert names.count("protobuf") == 1


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
