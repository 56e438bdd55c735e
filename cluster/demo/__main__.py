"""`python -m cluster.demo`, which `make demo` runs."""

import sys

from cluster.demo.app import main

if __name__ == "__main__":
    sys.exit(main())
