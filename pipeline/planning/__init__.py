"""From lengths to the segments of every step; needs NumPy only."""
