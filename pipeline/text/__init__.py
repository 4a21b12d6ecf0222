"""Text: how do records become tokens?

A source gives records by number, a template says which text of a record is read and which is learnt,
and a tokenizer makes ids of it. The fingerprint of each says when tokens have to be made anew.
"""

from pipeline.text import sources, templates, tokenizers
from pipeline.text.fingerprints import fingerprint
from pipeline.text.templates import Function

__all__ = ["Function", "fingerprint", "sources", "templates", "tokenizers"]
