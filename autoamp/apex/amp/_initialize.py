"""`apex.amp._initialize`: `initialize` by the name of its inner part."""

from autoamp.apex.amp.frontend import initialize as _initialize
