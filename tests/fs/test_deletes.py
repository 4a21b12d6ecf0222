"""Everything that the package deletes, with the rule by which it is its own."""

import ast

from tests.processes import ROOT

PLACES = ROOT / "pipeline", ROOT / "trainer"

# Methods and functions that delete files, and classes that do it.
DELETES = {"rmtree", "unlink", "rmdir", "removedirs", "delete", "delete_async"}
DELETES |= {"TemporaryDirectory", "CheckpointManager"}

OWN_FOLDER = "in a folder with a random name that this process made"
OWN_NAME = "by a name with digits that only it gives, in the directory of"

RULES = {
    "corpus/stored/cache.py:PartCache._fetch": "parts that are fetched, which it has locked",
    "corpus/stored/cache.py:PartCache._make_room": f"{OWN_NAME} the cache of this digest",
    "corpus/stored/cache.py:PartCache._verify": f"{OWN_NAME} the cache of this digest",
    "corpus/preparing/preparation.py:_discarding": f"{OWN_NAME} a corpus that it began there",
    "corpus/stored/writer.py:Writer._remove_rest": f"{OWN_NAME} a corpus: unsealed parts",
    "fs/atomic.py:_link": "its own temporary name, of 32 random digits",
    "fs/atomic.py:_rename_once": "an empty folder that marks its turn, or that of a killed process",
    "fs/atomic.py:remove_leftovers": "temporary names of a finished corpus or a locked run",
    "fs/atomic.py:atomic_write": "its own temporary name, of 32 random digits",
    "fs/atomic.py:remove_files": "names that the caller gives as a pattern of its own files",
    "fs/objects.py:ObjectPath.rmtree": "what the caller says",
    "fs/objects.py:ObjectPath.unlink": "what the caller says",
    "fs/objects.py:delete.remove": "what the caller says",
    "history/step_files.py:StepFiles.remove": f"{OWN_NAME} losses: steps that are made again",
    "history/log_parts.py:remove_parts": f"{OWN_NAME} a run, whose log has their bytes",
    "trainer/checkpoint.py:Checkpoints.__init__": "by orbax, but for what should_preserve names",
    "trainer/mirror.py:_make_scratch": OWN_FOLDER,
    "trainer/mirror.py:Mirror.push": "folders named by a number that have the mark of a checkpoint",
    "trainer/mirror.py:_remove_leftovers": "folders of killed processes, whose locks nobody holds",
    "trainer/parameters.py:start_from": "arrays of JAX, no files",
    "trainer/tensorboard.py:TensorBoard.__init__": OWN_FOLDER,
    "trainer/tensorboard.py:TensorBoard.save": "events in its own temporary folder, once uploaded",
    "steps/hosts.py:require_shared": "a file with a random name that it made",
}


def name_of(path):
    """The path of a file as in `RULES`."""
    return path.relative_to(ROOT).as_posix().removeprefix("pipeline/")


def find(path):
    """The functions of a file in which a name of `DELETES` is called, or `os.remove`."""
    names = set()

    def walk(node, scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = [*scope, node.name]
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", None))
        if name in DELETES or (name == "remove" and getattr(called.value, "id", "") == "os"):
            names.add(f"{name_of(path)}:{'.'.join(scope)}")
        for child in ast.iter_child_nodes(node):
            walk(child, scope)

    walk(ast.parse(path.read_text()), [])
    return names


def test_each_place_that_deletes_files_has_a_rule_that_makes_it_safe():
    names = set().union(*(find(path) for folder in PLACES for path in folder.rglob("*.py")))
    assert names == RULES.keys()
