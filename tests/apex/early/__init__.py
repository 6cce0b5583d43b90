"""Tests of `autoamp.apex.early`."""
