"""The tree's `apex.parallel.multiproc`."""

from __future__ import annotations

import sys

from autoamp.compat.missing import missing_names
from autoamp.parallel import multiproc

main = multiproc.main

__getattr__ = missing_names(__name__)

if __name__ == "__main__":
    sys.exit(main())
