"""Tests of `autoamp.modules`."""
