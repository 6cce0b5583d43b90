"""The tree's `apex.amp.scaler`."""

from autoamp.apex.amp.scaler import LossScaler
