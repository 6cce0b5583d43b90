from autoamp.apex.fp16_utils import *
