"""What stands behind `apex.amp`."""
