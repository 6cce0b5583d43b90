"""The tree's `apex.amp.lists.tensor_overrides`, read off the list set `apex`."""

import torch

from autoamp.apex.amp.listed import lists_of

globals().update(lists_of(torch.Tensor))
