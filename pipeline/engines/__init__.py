"""Engines: what runs the tasks of a preparation, on this machine or on many."""

from pipeline.engines.beam import Beam
from pipeline.engines.engine import Engine
from pipeline.engines.processes import Processes
from pipeline.engines.ray import Ray

__all__ = ["Beam", "Engine", "Processes", "Ray"]
