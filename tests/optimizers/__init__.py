"""Tests of `autoamp.optimizers`."""
