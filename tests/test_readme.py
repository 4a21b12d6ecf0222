"""The README is kept true: its Python runs, its commands and its tree name what exists."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number, tmp_path):
    # Each snippet may use what those before it made.
    code = "\n".join(SNIPPETS[: number + 1])
    (tmp_path / "a.txt").write_text("one\n" * 50)
    (tmp_path / "b.txt").write_text("two words\nthree small words\n" * 50)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr  # also not where Python ends with a loader open


def test_the_example_for_other_projects_is_short():
    assert len([line for line in SNIPPETS[0].splitlines() if line.strip()]) <= 12


def test_the_tree_names_every_package_once():
    tree = re.search(r"```text\n(pipeline/.*?)```", README, re.S).group(1)
    named = re.findall(r"^  ([\w/.]+)", tree, re.M)
    there = [
        path.name + "/" * path.is_dir()
        for path in (ROOT / "pipeline").iterdir()
        if (path.suffix == ".py" or path.is_dir()) and not path.name.startswith("__")
    ]
    assert sorted(named) == sorted(there)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
