"""Programs as users write them, to be read by type checkers, and not run: `mypy` does so, and `test_programs.py`."""
