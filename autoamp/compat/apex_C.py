"""`apex_C`, as autoamp serves it: Apex's extension that joins tensors into one and splits it again."""

from autoamp.torch_private import flatten, unflatten
