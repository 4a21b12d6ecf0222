"""Templates: from a record to spans of text, each with its loss weight."""

from pipeline.fingerprints import fingerprint
from pipeline.templates.answer import Answer
from pipeline.templates.chat import Chat
from pipeline.templates.filled_source import FilledSource
from pipeline.templates.template import Span, Template, encode
from pipeline.tokenizers import Markup

__all__ = ["Answer", "Chat", "FilledSource", "Markup", "Span", "Template", "encode", "fingerprint"]
