"""The tree's `apex.parallel.LARC`."""

from autoamp.parallel import LARC
