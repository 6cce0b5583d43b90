"""`apex.amp.lists.functional_overrides`, read off the list set `apex`."""

import torch

from autoamp.apex.amp.lists import lists_of

globals().update(lists_of(torch.nn.functional))
