"""Fingerprints of functions and objects, from all that decides what they do.

A fingerprint is the same in every process and on every host, wherever the code lies, on whatever
lines, however it is laid out, and, as far as syntax trees go, on every version of Python.
"""

from pipeline.text.fingerprints.fingerprint import Function, fingerprint

__all__ = ["Function", "fingerprint"]
