"""The tree's `apex.parallel.multiproc`."""

import sys

from autoamp.parallel import multiproc

main = multiproc.main

if __name__ == "__main__":
    sys.exit(main())
