"""The demonstration data of configs/: every function of the library, in one split."""

from configs.python_data import Dialogues, Docstrings, definitions


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
