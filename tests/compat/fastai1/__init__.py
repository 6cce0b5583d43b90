"""Tests of `autoamp.compat.fastai1`."""
