"""Views: the tokens of a corpus, asked something else; what is random is drawn in each epoch."""

from pipeline.views.masked import Masked
from pipeline.views.span_corruption import SpanCorruption

__all__ = ["Masked", "SpanCorruption"]
