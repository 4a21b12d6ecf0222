"""Records to tokens: sources, templates, tokenizers."""

from pipeline.text import sources, templates, tokenizers
from pipeline.text.fingerprints import fingerprint
from pipeline.text.templates import Function

__all__ = ["Function", "fingerprint", "sources", "templates", "tokenizers"]
