"""Regions: where in the text of a chat template each answer is, from its prompt to its end."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.errors import InvalidValue
from pipeline.text.notes import note
from pipeline.text.turns import WEIGHTS_OF_TURNS

# Characters that no text has: what a model generates is between them.
BEGIN, END = "\ufdd1", "\ufdd2"

# And others: one before the number of a turn, and its hexadecimal digits.
TAG, DIGITS = "\ufdd3", "".join(map(chr, range(0xFDE0, 0xFDF0)))
TAGS = re.compile(f"{TAG}([{DIGITS}]+)")

# A mark of a template: a name between signs, such as <|end|>, [INST] or </s>.
MARK = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{1,60}\]")
LONGEST_MARK = 64

# Up to so many answers, each has a prompt of its own.
FEW = 4

REWRITTEN = (
    "have earlier answers that the template spells otherwise than while they are the last; "
    "last_only=True learns the last answer alone"
)
PROMPTED = "have an answer that does not begin as the prompt of the template ends"

# Fields of a turn, and of a call of a tool, that decide how it is spelt.
DECIDE = ("role", "name", "type", "id", "tool_call_id", *WEIGHTS_OF_TURNS)


class Region(NamedTuple):
    """Text that is learnt: its turn, and where it begins and ends."""

    turn: int
    begin: int
    end: int


@dataclasses.dataclass
class Conversation:
    """The turns of a chat, and the text that a template makes of them.

    Attributes:
        turns: all turns.
        spell: the text of some turns, and with True after them of the prompt of an answer; it marks
            what is generated.
        marked: the text of all turns.
        what: names the turns in errors.
        sought: a pattern of what the template looks for in texts.
    """

    turns: Sequence[Mapping[str, Any]]
    spell: Callable[[Sequence[Any], bool], str]
    marked: str
    what: str
    sought: str

    @functools.cached_property
    def text(self) -> str:
        """The text of all turns, without marks of what is generated."""
        return strip(self.marked)

    @functools.cached_property
    def answers(self) -> list[int]:
        """The numbers of the turns of the assistant."""
        return [n for n, turn in enumerate(self.turns) if turn.get("role") == "assistant"]

    def find(self, answers: Sequence[int]) -> list[Region]:
        """The regions of some turns, in order."""
        if not answers:
            return []
        if BEGIN in self.marked:
            return self._find_generated(answers)
        regions, sizes = list[Region](), dict[Any, int]()
        for number in answers:
            begin, end = self._find_edges(number, sizes)
            if begin is None or end is None or begin < (regions[-1].end if regions else 0):
                raise InvalidValue(self._unclear(number))
            regions.append(Region(number, begin, max(begin, end)))
        return regions

    def _unclear(self, number: int) -> str:
        advice = "give a template with {% generation %} around what is generated"
        if number < self.answers[-1]:
            advice = f"give last_only=True to learn the last answer alone, or {advice}"
        return (
            f"the chat template spells turn {number} of {self.what} so that its text cannot be "
            f"told from the rest; {advice}"
        )

    # ---- what a template itself marks as generated

    def _find_generated(self, answers: Sequence[int]) -> list[Region]:
        """The regions that the template marks; a turn may have several of them, or share one."""
        spans = generated(self.marked)
        if len(spans) == len(self.answers):
            pairs = zip(self.answers, spans, strict=True)
            return [Region(n, *span) for n, span in pairs if n in answers]
        starts = {
            n: self._tagged[n][0] if n in self._tagged else self._find_begin(n)
            for n in self.answers
        }
        regions = [
            Region(max((n for n, at in starts.items() if (at or 0) < end), default=-1), begin, end)
            for begin, end in spans
        ]
        if None in starts.values() or {*starts} != {region.turn for region in regions}:
            raise InvalidValue(
                f"{self.what} have {len(starts)} turns of the assistant, and the template marks "
                f"{len(spans)} texts as generated; correct the record or the template"
            )
        return [region for region in regions if region.turn in answers]

    # ---- where the text of turns is

    @functools.cached_property
    def _cores(self) -> dict[int, tuple[int, int]]:
        """Where the own text of turns begins and ends; none if turns are spelt out of order."""
        cores = sorted(self._tagged.items())
        in_order = all(one[1] <= other[0] for (_, one), (_, other) in itertools.pairwise(cores))
        return dict(cores) if in_order else {}

    @functools.cached_property
    def _tagged(self) -> dict[int, tuple[int, int]]:
        """Where the own text of turns begins and ends, of those whose text is found."""
        for fields in (None, ("content",)):
            try:
                turns = [self._tag(turn, n, fields) for n, turn in enumerate(self.turns)]
                tagged = strip(self.spell(turns, False))
            except InvalidValue:
                continue
            if TAGS.sub("", tagged) == self.text:
                return _read_tags(tagged)
        return {}

    def _tag(self, turn: Mapping[str, Any], number: int, fields: Any) -> dict[str, Any]:
        """A turn whose texts have its number at both ends, inside of white space."""
        tag = TAG + "".join(DIGITS[int(digit, 16)] for digit in f"{number:x}")
        pattern = re.compile(f"({self.sought})")

        def change(text: str) -> str:
            pieces = pattern.split(text)
            for n in range(0, len(pieces), 2):
                if core := pieces[n].strip():
                    pieces[n] = pieces[n].replace(core, f"{tag}{core}{tag}", 1)
            return "".join(pieces)

        def change_call(call: Any) -> Any:
            if not isinstance(call, Mapping):
                return call
            tagged = dict(call)
            for key in {"name", "arguments"} & {*call}:
                tagged[key] = _change_values(call[key], change)
            if "function" in call:
                tagged["function"] = change_call(call["function"])
            return tagged

        changed = {}
        for name, value in turn.items():
            if name in DECIDE or (fields is not None and name not in fields):
                changed[name] = value
            elif name == "tool_calls":
                changed[name] = [*map(change_call, value)] if isinstance(value, list) else value
            else:
                changed[name] = _change_values(value, change)
        return changed

    # ---- where an answer begins and ends

    def _find_begin(self, number: int) -> int | None:
        """Where an answer begins: after what its prompt has in common with the text."""
        prompt = self._spell(self.turns[:number], prompt=True)
        is_exact = prompt is not None and self.text.startswith(prompt)
        if number and prompt is not None and is_exact:
            return len(prompt)
        before, core = self._end_before(number), self._cores.get(number)
        at = count_shared(prompt or "", self.text)
        if core is None:
            return at if is_exact else None
        if number and prompt is not None and before is not None and at >= before:
            note(PROMPTED, f"turn {number} of {self.what}")
            return min(at, core[0])
        # A prompt of no turns may lack what begins every chat: the header of another prompt.
        first = MARK.match(self._header)
        start = first[0] if first else self._header[:1]
        begin = self.text.rfind(start, before or 0, core[0]) if start else -1
        if begin >= 0:
            begin += count_shared(self._header, self.text[begin : core[0]])
            return max(begin, at) if is_exact else begin
        return at if is_exact else core[0]

    def _find_end(self, number: int, begin: int) -> int | None:
        """Where an answer ends: after what the text has in common with it as the last turn."""
        if number == len(self.turns) - 1:
            return len(self.text)
        alone = self._spell(self.turns[: number + 1])
        if alone is not None and self.text.startswith(alone):
            return len(alone)
        core, at = self._cores.get(number), count_shared(alone or "", self.text)
        if at >= (core[1] if core else begin):  # only what ends a chat is another
            return at
        if core is None:
            return None
        note(REWRITTEN, f"turn {number} of {self.what}")
        first = self.turns[: number + 1]
        core_alone = dataclasses.replace(self, turns=first, marked=alone or "")._cores.get(number)
        if alone is None or core_alone is None:  # what comes after the last answer
            last = self._cores.get(len(self.turns) - 1)
            tail = self.text[last[1] :] if last else ""
        else:
            tail = alone[core_alone[1] :]
        return core[1] + count_shared(tail, self.text[core[1] :])

    def _end_before(self, number: int) -> int | None:
        """Where the text of the turn before one ends; None if that is unknown."""
        return self._cores.get(number - 1, (0, None if number else 0))[1]

    def _spell(self, turns: Sequence[Any], prompt: bool = False) -> str | None:
        """The text of some turns, without marks; None if the template fails for them."""
        try:
            return strip(self.spell(turns, prompt))
        except InvalidValue:
            return None

    @functools.cached_property
    def _header(self) -> str:
        """What a prompt adds to the text of all turns."""
        prompt = self._spell(self.turns, prompt=True) or ""
        return prompt[count_shared(prompt, self.text) :]

    def _find_edges(self, number: int, sizes: dict[Any, int]) -> tuple[int | None, int | None]:
        """Where an answer begins and ends, as between the same texts and roles before.

        So the number of texts that are spelt does not grow with that of turns. `sizes` has what was
        found so far: by the text and the role beside an answer, the size of what is learnt there,
        before its own text or after it.
        """
        if len(self.answers) <= FEW or (core := self._cores.get(number)) is None:
            begin = self._find_begin(number)
            return begin, None if begin is None else self._find_end(number, begin)
        before, after = self._end_before(number), self._cores.get(number + 1, (None,))[0]
        roles = [self._role(number + step) for step in (-1, 1)]
        begins = before is not None and ("begin", self.text[before : core[0]], roles[0])
        ends = after is not None and ("end", self.text[core[1] : after], roles[1])
        head, tail = sizes.get(begins), sizes.get(ends)
        if head is None and (at := self._find_begin(number)) is not None:
            head = core[0] - at
        if tail is None and (at := self._find_end(number, core[0])) is not None:
            tail = at - core[1]
        sizes |= {
            key: size for key, size in ((begins, head), (ends, tail)) if key and size is not None
        }
        return None if head is None else core[0] - head, None if tail is None else core[1] + tail

    def _role(self, number: int) -> Any:
        return self.turns[number].get("role") if 0 <= number < len(self.turns) else None


def _change_values(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with its texts changed, but for keys and what says a kind."""
    if isinstance(value, Mapping):
        return {
            key: entry if key in DECIDE else _change_values(entry, change)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_change_values(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value


def _read_tags(tagged: str) -> dict[int, tuple[int, int]]:
    """Where the text between the first and the last tag of each number is, without tags."""
    cores, removed = dict[int, tuple[int, int]](), 0
    for tag in TAGS.finditer(tagged):
        number = int("".join(f"{DIGITS.index(digit):x}" for digit in tag[1]), 16)
        at = tag.start() - removed
        cores[number] = cores.get(number, (at, at))[0], at
        removed += len(tag[0])
    return cores


def strip(marked: str) -> str:
    """The text without the characters that mark what is generated."""
    return marked.replace(BEGIN, "").replace(END, "") if BEGIN in marked else marked


def generated(marked: str) -> list[tuple[int, int]]:
    """Where generated texts begin and end in the text without the characters that mark them.

    >>> generated(f"a{BEGIN}bc{END}d{BEGIN}{END}")
    [(1, 3), (4, 4)]
    """
    signs = enumerate(re.finditer(f"[{BEGIN}{END}]", marked))
    edges = [sign.start() - before for before, sign in signs]
    return list(zip(edges[::2], edges[1::2], strict=True))


def count_shared(one: str, other: str) -> int:
    """The number of characters with which both texts begin, without a part of a mark.

    >>> count_shared("a<|end|>b", "a<|end|>c"), count_shared("a<|end|>", "a<|eot|>")
    (8, 1)
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    for text in (one, other):
        for mark in MARK.finditer(text, max(low - LONGEST_MARK, 0), low + LONGEST_MARK):
            if mark.start() < low < mark.end():
                low = mark.start()
    return low
