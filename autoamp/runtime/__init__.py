"""The process's one active handle: how it is made, installed, switched, and what the public API does with it."""

from __future__ import annotations

from autoamp.runtime.active import activated as activated
from autoamp.runtime.active import current_handle as current_handle
from autoamp.runtime.active import current_runtime as current_runtime
from autoamp.runtime.active import handles as handles
from autoamp.runtime.active import needed_handle as needed_handle
from autoamp.runtime.active import put_handle as put_handle
from autoamp.runtime.api import Region as Region
from autoamp.runtime.api import disable_casts as disable_casts
from autoamp.runtime.api import float_function as float_function
from autoamp.runtime.api import half_function as half_function
from autoamp.runtime.api import init as init
from autoamp.runtime.api import promote_function as promote_function
from autoamp.runtime.api import region as region
from autoamp.runtime.api import register_float_function as register_float_function
from autoamp.runtime.api import register_half_function as register_half_function
from autoamp.runtime.api import register_promote_function as register_promote_function
from autoamp.runtime.handle import BaseHandle as BaseHandle
from autoamp.runtime.handle import Handle as Handle
from autoamp.runtime.handle import NoOpHandle as NoOpHandle
from autoamp.runtime.handle import runtime_of as runtime_of
from autoamp.runtime.runtime import Looks as Looks
from autoamp.runtime.runtime import Runtime as Runtime
from autoamp.runtime.runtime import suspended as suspended
from autoamp.runtime.settings import OnNonfinite as OnNonfinite
from autoamp.runtime.settings import Settings as Settings
from autoamp.runtime.settings import check_device as check_device
from autoamp.runtime.settings import device_type_of as device_type_of
from autoamp.runtime.settings import versions as versions
