"""`python -m pipeline COMMAND`, which is `lockstep COMMAND`."""

import sys

from pipeline.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
