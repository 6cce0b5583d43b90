"""The functions of `amp_C`, which work on lists of tensors, on torch's ``_foreach`` functions."""
