"""Tests of `autoamp.tape`."""
