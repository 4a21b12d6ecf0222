"""Text: from records to tokens.

A source returns records by number, a template turns a record into text with loss weights, and a
tokenizer turns text into ids. A corpus keeps the fingerprints of all three.
"""

from pipeline.text import sources, templates, tokenizers
from pipeline.text.features import Feature
from pipeline.text.fingerprints import fingerprint
from pipeline.text.templates import Function

__all__ = ["Feature", "Function", "fingerprint", "sources", "templates", "tokenizers"]
