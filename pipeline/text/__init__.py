"""Text: how records become tokens.

A source gives records by number, a template says which text of a record is read and which is
learnt, and a tokenizer makes ids of it. By their fingerprints, a corpus knows what it was made of.
"""

from pipeline.text import sources, templates, tokenizers
from pipeline.text.features import Feature
from pipeline.text.fingerprints import fingerprint
from pipeline.text.templates import Function

__all__ = ["Feature", "Function", "fingerprint", "sources", "templates", "tokenizers"]
