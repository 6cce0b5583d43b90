"""The tree's `apex.parallel.distributed`."""

from autoamp.apex.parallel import DistributedDataParallel, Reducer, flat_dist_call
from autoamp.tensors import flatten, unflatten
