"""`apex.contrib`, as far as programs use it and torch can do it."""
