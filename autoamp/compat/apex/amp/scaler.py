"""The tree's `apex.amp.scaler`."""

from autoamp.compat.amp.scaler import LossScaler
