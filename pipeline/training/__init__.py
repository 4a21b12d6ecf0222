"""Steps compiled ahead of time, and the loop over them."""
