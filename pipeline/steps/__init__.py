"""Compiled steps: memory, microbatches, accumulation, hosts."""
