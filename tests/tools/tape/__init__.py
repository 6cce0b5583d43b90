"""Tests of `autoamp.tools.tape`."""
