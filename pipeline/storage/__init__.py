"""Tokenised examples on disk: prepared, written, and read by number."""
