"""Engines: what runs the tasks of a preparation, on this machine or on many."""

from pipeline.corpus.engines.beam import Beam
from pipeline.corpus.engines.engine import Engine
from pipeline.corpus.engines.processes import Processes
from pipeline.corpus.engines.ray import Ray

__all__ = ["Beam", "Engine", "Processes", "Ray"]
