"""Parses flags as train.py does, and prints the config."""

import sys

import train

if __name__ == "__main__":
    sys.argv[0] = "train.py"
    train.launch.parse_flags(sys.argv)
    print(train.CONFIG.value)
