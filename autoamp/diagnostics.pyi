from autoamp.tools import *
