"""Tests of `autoamp.compat.early`."""
