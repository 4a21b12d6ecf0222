"""What `python -m pipeline` runs."""
