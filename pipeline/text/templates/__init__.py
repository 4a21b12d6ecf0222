"""Templates: from a record to spans of text, each with its loss weight."""

from pipeline.text.fingerprints import fingerprint
from pipeline.text.templates.answer import Answer
from pipeline.text.templates.chat import Chat
from pipeline.text.templates.filled_source import FilledSource
from pipeline.text.templates.template import Span, Template, encode
from pipeline.text.tokenizers import Markup

__all__ = ["Answer", "Chat", "FilledSource", "Markup", "Span", "Template", "encode", "fingerprint"]
