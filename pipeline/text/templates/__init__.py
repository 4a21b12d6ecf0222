"""Templates: from a record to spans of text, each with the loss weight of its tokens.

A template is a pure function or an instance of a dataclass, so that it has a fingerprint; see
`pipeline.text.fingerprints`.
"""

from pipeline.text.encoding import encode
from pipeline.text.fingerprints import fingerprint
from pipeline.text.markup import Markup
from pipeline.text.notes import note
from pipeline.text.slots import Slots
from pipeline.text.template import (
    LeftOut,
    Span,
    Template,
    Traits,
    fill,
    texts,
    traits_of,
)
from pipeline.text.templates.answer import Answer
from pipeline.text.templates.chat import Chat
from pipeline.text.templates.function import Function
from pipeline.text.templates.jinja import Jinja
from pipeline.text.templates.pair import Pair
from pipeline.text.templates.preference import Preference

__all__ = [
    "Answer",
    "Chat",
    "Function",
    "Jinja",
    "LeftOut",
    "Markup",
    "Pair",
    "Preference",
    "Slots",
    "Span",
    "Template",
    "Traits",
    "encode",
    "fill",
    "fingerprint",
    "note",
    "texts",
    "traits_of",
]

# Pickles, and fingerprints of functions that name them, have this name, wherever they are defined.
for _each in (Answer, Chat, Function, Jinja, LeftOut, Markup, Pair, Preference, Slots, note):
    _each.__module__ = __name__
