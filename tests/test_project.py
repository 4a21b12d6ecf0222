"""The package as another project has it: installed into its environment, without the repository."""

import ast
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


def make_environment(place):
    """The Python of a new environment, and the folder of its packages."""
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin/python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return python, pathlib.Path(subprocess.check_output([python, "-c", asked], text=True).strip())


PATHS = sorted({*site.getsitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))})


@pytest.fixture(scope="module")
def python(source, tmp_path_factory):
    """The Python of a new environment with the package installed, and this one's packages.

    They are found by a path file, which does not read the path files of this environment: so the
    package is the installed one even if this environment has it in place.
    """
    python, packages = make_environment(tmp_path_factory.mktemp("environment"))
    (packages / "dependencies.pth").write_text("\n".join(PATHS) + "\n")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", packages, source]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.fixture(scope="module")
def bare_python(python, tmp_path_factory):
    """The Python of an environment that has what `pip install` of the package alone installs.

    Its packages are links to the files of the package, and of those that it needs, with theirs.
    """
    bare, packages = make_environment(tmp_path_factory.mktemp("bare"))
    asked = "import pipeline; print(pipeline.__path__[0])"
    installed = subprocess.check_output([python, "-I", "-c", asked], text=True).strip()
    found = importlib.metadata.distributions(path=[os.path.dirname(installed), *PATHS])
    by_name = {}
    for each in found:
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
    for name in {name for name, _ in done}:
        for file in by_name[name].files:
            if ".." not in file.parts:  # a script
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                (packages / file).symlink_to(file.locate())
    return bare


@pytest.fixture
def printed(python, tmp_path):
    """The lines that a piece of code prints there."""

    def lines_of(code):
        out = subprocess.check_output([python, "-I", "-c", code], cwd=tmp_path, text=True)
        return out.splitlines()

    return lines_of


def test_the_installed_package_is_pipeline_alone_with_its_command(printed, python):
    typed, place, others, version = printed(
        "import importlib.util, pathlib, pipeline, pipeline.report, pipeline.text.source;"
        "print(pathlib.Path(pipeline.__file__).with_name('py.typed').exists());"
        "print(pathlib.Path(pipeline.__file__).parent.parent);"
        "others = ('models', 'configs', 'trainer', 'tests');"
        "print([each for each in others if importlib.util.find_spec(each)])"
        "\nfrom importlib.metadata import entry_points;"
        "(script,) = entry_points(group='console_scripts', name='lockstep');"
        "script.load()(['--version'])"
    )
    assert version == f"lockstep {pipeline.__version__}"
    assert (typed, others) == ("True", "[]")
    assert pathlib.Path(place) != ROOT
    assert str(python.parent.parent) in place


def test_a_config_needs_a_checkout_and_the_command_says_so(python, tmp_path):
    (tmp_path / "mine.py").write_text("from configs import quickstart\n")
    command = [python, "-P", "-m", "pipeline", "report", "mine.py"]
    done = run(
        command, cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "a config is read by trainer/ of a checkout of Lockstep" in done.stderr


def test_planning_there_needs_numpy_only(printed):
    said = printed(
        "import sys, pipeline; pipeline.Plan([3, 4, 5], [pipeline.Bucket(2, 8)]).batch(0);"
        "print(sorted({'jax', 'grain', 'pyarrow', 'flax'} & set(sys.modules)))"
    )
    assert said == ["[]"]


def test_what_is_always_imported_is_a_dependency():
    modules = set()
    for path in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module)
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [Requirement(each).name for each in project["dependencies"]]
    files = [file for each in declared for file in importlib.metadata.files(each)]
    names = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    assert names <= {"pipeline", *(file.parts[0].removesuffix(".py") for file in files)}


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


def test_what_the_readme_shows_without_training_needs_no_extra(bare_python, tmp_path):
    (tmp_path / "zen.txt").write_text("pack the rows\n" * 500 + "of every length\n")
    (prepare,) = re.findall(r"^lockstep (prepare) (.+) (--into) (\w+)$", README.read_text(), re.M)
    commands = [[*prepare], ["report", "zen", "--html", "report.html"]]
    commands += [[name, "zen"] for name in ("report", "buckets", "show", "check")]
    commands += [["show", "zen", "--svg", "batch.svg"]]
    (snippet,) = (each for each in SNIPPETS if "lengths = np.array([300, 200" in each.content)
    (tmp_path / "snippet.py").write_text(snippet.content)
    (tmp_path / "all.py").write_text(WITHOUT_TRAINING.replace("COMMANDS", repr(commands)))
    said = run([bare_python, "-m", "pipeline", "--version"], cwd=tmp_path)
    assert said.stdout == f"lockstep {pipeline.__version__}\n", said.stderr
    done = run([bare_python, "all.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("flax", "optax", "orbax", "tensorflow_datasets", "sentencepiece", "pytest"):
        assert "ModuleNotFoundError" in run([bare_python, "-c", f"import {name}"]).stderr


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
    assert {"sentencepiece", "ray"} <= {*names}
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
