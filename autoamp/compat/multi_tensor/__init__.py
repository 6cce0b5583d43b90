"""What stands behind `amp_C`: functions of lists of tensors."""
