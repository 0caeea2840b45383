"""`python3 -m moejax` is the same as `moejax`."""

import sys

from moejax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
