"""Scoring: what a step makes of each example of a corpus, in the order of the corpus."""
