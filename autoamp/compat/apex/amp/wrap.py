"""The tree's `apex.amp.wrap`: its functions wrote into torch's namespace; they register functions now."""

from autoamp.compat.amp import utils
from autoamp.compat.amp.wrapping import cached_cast, make_cast_wrapper, make_promote_wrapper, promote, sequence_promote
from autoamp.runtime import disable_casts
