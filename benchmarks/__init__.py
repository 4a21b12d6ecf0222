"""Side-by-side measurements: `python -m benchmarks` measures, prints and writes `RESULTS.md`."""
