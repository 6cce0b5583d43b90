"""fastai v1 under mixed precision: its training loop follows the active handle, and its imports find what they need."""

from autoamp.apex.fastai1.shims import disable as disable
from autoamp.apex.fastai1.shims import enable as enable
from autoamp.apex.fastai1.training import watch as watch
