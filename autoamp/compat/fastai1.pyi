from autoamp.apex.fastai1 import *
