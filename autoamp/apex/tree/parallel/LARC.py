"""The tree's `apex.parallel.LARC`."""

from autoamp.apex.parallel import LARC
