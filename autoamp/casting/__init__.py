"""Casts of arguments: what an op's tensors become, which casts are kept, and whether casts are on in a thread."""

from __future__ import annotations

from autoamp.casting.cache import CastCache as CastCache
from autoamp.casting.cache import cast_for_any_mode as cast_for_any_mode
from autoamp.casting.cache import is_cacheable as is_cacheable
from autoamp.casting.casts import CASTABLE_DTYPES as CASTABLE_DTYPES
from autoamp.casting.casts import CastArgs as CastArgs
from autoamp.casting.casts import CastState as CastState
from autoamp.casting.casts import cast_call as cast_call
from autoamp.casting.casts import dtype_with_sparse as dtype_with_sparse
from autoamp.casting.flat_weights import RECURRENT_LAYERS as RECURRENT_LAYERS
from autoamp.casting.flat_weights import flat_layout as flat_layout
from autoamp.casting.flat_weights import flatten_weights as flatten_weights
from autoamp.casting.threads import HALF_MODEL as HALF_MODEL
from autoamp.casting.threads import ThreadMode as ThreadMode
from autoamp.casting.threads import ThreadState as ThreadState
from autoamp.casting.threads import Token as Token
from autoamp.casting.threads import TracedMode as TracedMode
