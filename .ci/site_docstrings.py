"""An extension of Griffe: the examples of docstrings as code, which to Markdown are quotations."""

import re

import griffe

# From a prompt to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.S | re.M)


class Examples(griffe.Extension):
    """Puts fences around examples, also in the sections of a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Changes the docstring of an object."""
        if obj.docstring:
            fence = r"\1```pycon\n\g<0>\n\1```"
            obj.docstring.value = EXAMPLE.sub(fence, obj.docstring.value)
