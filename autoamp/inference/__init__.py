"""Weights that are promised to stay: their casts are kept, packed where the device has a faster layout."""

from __future__ import annotations

from autoamp.inference.layers import pin_layer
from autoamp.inference.lstm import LSTM, build_lstm

__all__ = ["LSTM", "build_lstm", "pin_layer"]
