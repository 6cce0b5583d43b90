"""What programs import from `apex.amp.rnn_compat`."""


def has_old_rnns() -> bool:
    """Return False: this torch has no recurrent layers from before torch 1.0."""
    return False
