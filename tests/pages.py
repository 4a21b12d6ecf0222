"""The fenced blocks of the README and of docs/."""

import dataclasses
import itertools
import pathlib
import re

from tests.processes import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page; `output` is the text block right after it, if there is one."""

    page: pathlib.Path
    line: int  # of its first line of content
    kind: str
    content: str
    output: str | None = None

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page):
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    for match, after in itertools.zip_longest(found, found[1:]):
        follows = after and after[1] == "text" and not text[match.end() : after.start()].strip()
        line = text[: match.start()].count("\n") + 2
        yield Block(page, line, match[1], match[2], after[2] if follows else None)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SNIPPETS = [block for block in BLOCKS if block.kind == "python"]
