"""The demonstration data of configs/: every function of the library, in one split."""

import pytest

from configs.python_data import Dialogues, Docstrings, Functions, definitions


@pytest.fixture(scope="module")
def splits():
    return Functions("train"), Functions("validation")


@pytest.mark.slow
def test_the_standard_library_divides_into_modules_of_train_and_validation(splits):
    sets = [list(source) for source in splits]
    modules = [{record["module"] for record in records} for records in sets]
    assert not modules[0] & modules[1]
    assert {"ast", "json.decoder"} <= modules[0] | modules[1]
    assert not any("test" in name.split(".") for name in modules[0] | modules[1])
    sizes = [sum(len(record["text"]) for record in records) for records in sets]
    assert 0.02 < sizes[1] / sum(sizes) < 0.1
    assert sum(sizes) > 4_000_000
    texts = [record["text"] for records in sets for record in records]
    assert len(texts) > 10_000
    assert all(text.lstrip("@").strip() for text in texts)


def test_docstrings_and_dialogues_are_about_the_same_functions():
    pairs, dialogues = list(Docstrings("validation")), list(Dialogues("validation"))
    assert len(pairs) > 100
    assert all(pair["docstring"] and "(" in pair["signature"] for pair in pairs)
    turns = [turn for dialogue in dialogues for turn in dialogue["messages"]]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert answers == [pair["signature"] for pair in pairs]
    roles = [turn["role"] for turn in dialogues[0]["messages"]]
    assert roles == ["system", *["user", "assistant"] * 3]


def test_functions_are_taken_with_their_decorators_and_without_their_indentation():
    source = b'''
if True:
    def a(): return 1
class B:
    @property
    # comment
    def c(self):
        def inner():
            return "\\x0c"
        return inner
    class D:
        async def e(self): ...
try: pass
except ValueError:
    def f():
        """One
    two."""
'''
    found = list(definitions(source))
    assert [name for name, _, _ in found] == ["a", "B.c", "B.D.e", "f"]
    assert found[0][1] == "def a(): return 1\n"
    assert found[1][1].startswith("@property\n# comment\ndef c(self):\n    def inner():\n")
    assert found[1][1].endswith("    return inner\n")
