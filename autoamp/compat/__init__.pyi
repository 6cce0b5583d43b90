from autoamp.apex import *
from autoamp.apex.fastai1 import watch as watch_fastai1
