"""``python -m autoamp``: the same as the command ``autoamp``."""

from __future__ import annotations

import sys

from autoamp.cli import main

if __name__ == "__main__":
    sys.exit(main())
