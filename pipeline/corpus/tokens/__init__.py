"""Token files of other programs: a reader for each format, and what all of them return."""
