from autoamp.apex.parallel import *
