"""Corpora without a copy: tokens that lie elsewhere, and text that is tokenised when it is read."""

from pipeline.external.in_place import InPlace
from pipeline.external.on_the_fly import OnTheFly, index

__all__ = ["InPlace", "OnTheFly", "index"]
