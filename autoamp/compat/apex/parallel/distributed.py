"""The tree's `apex.parallel.distributed`."""

from autoamp.parallel import DistributedDataParallel, Reducer, apply_flat_dist_call, flat_dist_call, split_by_type
from autoamp.tensors import flatten, unflatten
