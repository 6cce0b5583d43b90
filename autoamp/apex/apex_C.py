"""`apex_C`, as autoamp serves it: Apex's extension that joins tensors into one and splits it again."""

from autoamp.tensors import flatten, unflatten
