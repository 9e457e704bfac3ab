"""`python -m gdlab` is `gdlab`."""

import sys

from gdlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
