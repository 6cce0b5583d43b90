"""Tests of `autoamp.fp16_utils`."""
