"""The main module of a process that multiprocessing starts for a program under ``autoamp run``.

It stands in for the program's own main module: run as ``__mp_main__``, it sets the process up and takes the names of
the program, by which what the parent pickled is found.
"""

from __future__ import annotations

from autoamp.cli.launch import names_of_main

if __name__ == "__mp_main__":
    globals().update(names_of_main())
