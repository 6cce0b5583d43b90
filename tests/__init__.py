"""Tests: a folder for each package of autoamp, and what crosses them."""
