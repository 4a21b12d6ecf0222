"""Records to tokens: sources, templates, tokenizers."""

from pipeline.text.fingerprints import Function

__all__ = ["Function"]
