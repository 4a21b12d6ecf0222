"""The parts of `train.py`: its config, its schedule, its corpora."""
