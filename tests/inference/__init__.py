"""Tests of `autoamp.inference`."""
