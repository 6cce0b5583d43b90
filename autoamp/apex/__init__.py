"""The legacy family, laid out as Apex was: `import apex` gives these modules once `install_as_apex` was called."""

from autoamp.apex.alias import APEX_VERSION as __version__
from autoamp.apex.alias import added_to_real_apex as added_to_real_apex
from autoamp.apex.alias import explain_real_apex as explain_real_apex
from autoamp.apex.alias import install_as_apex as install_as_apex
from autoamp.apex.alias import real_apex as real_apex
from autoamp.apex.alias import uninstall as uninstall
from autoamp.apex.fastai1 import watch as watch_fastai1
