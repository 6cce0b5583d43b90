"""The tree's `apex.parallel.multiproc`."""

import sys

from autoamp.apex.parallel import multiproc

main = multiproc.main

if __name__ == "__main__":
    sys.exit(main())
