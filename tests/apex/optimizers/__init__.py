"""Tests of `autoamp.apex.optimizers`."""
