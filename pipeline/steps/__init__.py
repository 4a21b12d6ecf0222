"""Compiled steps: memory, microbatches, accumulation, hosts."""

from pipeline.steps.compile_log import CompileGuard
from pipeline.steps.compiled import Compiled

__all__ = ["CompileGuard", "Compiled"]
