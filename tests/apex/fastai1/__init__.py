"""Tests of `autoamp.apex.fastai1`."""
