from autoamp.apex.optimizers import *
