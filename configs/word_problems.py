"""Arithmetic word problems with a right and a wrong answer, made by this script: no download.

A config names them as `config.train.source = "configs.word_problems:problems"`.
"""

import random
import zlib

NAMES = ("Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "cards", "coins", "keys", "marbles", "pens", "shells", "stamps")

# A question, and the operation that it asks for.
QUESTIONS = (
    ("{name} has {a} {thing} and finds {b} more. How many are there now?", "+"),
    ("{name} has {a} {thing} and buys another {b}. How many are there now?", "+"),
    ("There are {a} {thing}, and {name} brings {b}. How many are there now?", "+"),
    ("{name} has {a} {thing} and gives {b} away. How many are left?", "-"),
    ("{name} had {a} {thing} and lost {b} of them. How many are left?", "-"),
    ("There are {a} {thing}, and {name} sells {b}. How many are left?", "-"),
    ("{name} fills {a} bags with {b} {thing} each. How many are in the bags?", "*"),
    ("{a} children each bring {name} {b} {thing}. How many does that make?", "*"),
)
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

COUNT = 8_000  # problems of both splits
HELD_OUT = 20  # one problem in this many is for validation


def problems(split: str) -> list[dict[str, str]]:
    """Records `{"question", "right", "wrong"}`; those of a split are always the same.

    A wrong answer uses another operation or another number of the text, or miscounts. No question
    is in both splits.

    Args:
        split: "train" or "validation", one problem in twenty.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}; it must be train or validation")
    # Only the method `random` gives the same numbers in every version of Python.
    draw = random.Random(0)

    def pick(things):
        return things[int(draw.random() * len(things))]

    made = {}
    while len(made) < COUNT:
        text, sign = pick(QUESTIONS)
        a = pick(range(10, 60))
        b = pick(range(2, 10)) if sign == "*" else pick(range(2, a))
        question = text.format(name=pick(NAMES), thing=pick(THINGS), a=a, b=b)
        right = a, sign, b, OPERATIONS[sign](a, b)
        other = pick([each for each in OPERATIONS if each != sign])
        wrong = pick(
            [
                (a, other, b, OPERATIONS[other](a, b)),
                (a, sign, a, OPERATIONS[sign](a, a)),
                (a, sign, b, right[-1] + pick((-10, -1, 1, 10))),
            ]
        )
        made[question] = (right, wrong)
    return [
        {"question": question, "right": _say(*right), "wrong": _say(*wrong)}
        for question, (right, wrong) in made.items()
        if (zlib.crc32(question.encode()) % HELD_OUT == 0) == (split == "validation")
    ]


def _say(a: int, sign: str, b: int, result: int) -> str:
    return f"{a} {sign} {b} = {result}, so the answer is {result}."
