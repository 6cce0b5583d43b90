"""Apex, as autoamp serves it: imported by the name `apex` once `autoamp.compat.install_as_apex` was called."""

from autoamp.apex.alias import APEX_VERSION as __version__
