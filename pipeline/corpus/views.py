"""Views: the tokens of a corpus, asked something else; what is random is drawn in each epoch."""

from collections.abc import Mapping
from typing import Any

from pipeline.corpus.corpus import Corpus
from pipeline.corpus.masked import Masked
from pipeline.corpus.span_corruption import SpanCorruption
from pipeline.corpus.view import View

__all__ = ["KINDS", "Masked", "SpanCorruption", "View", "view_of"]

KINDS: dict[str, type[Masked] | type[SpanCorruption]] = {
    view.kind: view for view in (Masked, SpanCorruption)
}


def view_of(corpus: Corpus, description: Mapping[str, Any]) -> View:
    """The view of a corpus that another view's `description` tells of."""
    options = dict(description)
    return KINDS[options.pop("kind")](corpus, **options)
