"""Builds autoamp with its list sets, and with `autoamp.pth` beside it; all metadata and settings are in setup.cfg.

The lists lie at the top of the tree, where people look for them, and a wheel has them as the package `autoamp.lists`.
setup.cfg could say so, but then an editable install would go by an import hook of setuptools, which type checkers and
editors cannot follow. So that package is added where files are copied; an editable install is a line in a .pth file.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLists(build_py):
    """Copies `lists/` too, as `autoamp/lists`, and `autoamp.pth`, the hook for `AUTOAMP=1`."""

    def finalize_options(self) -> None:
        """Add the package to those that are copied; the distribution's own record stays as it is."""
        super().finalize_options()
        self.packages = [*(self.packages or ()), "autoamp.lists"]
        self.package_dir = {**self.package_dir, "autoamp.lists": "lists"}

    def run(self) -> None:
        """Copy `autoamp.pth` too, which Python reads at its start."""
        super().run()
        # An editable install takes nothing from the build's folder. What is in that of the wheel is installed.
        wheel = self.get_finalized_command("install").install_purelib if self.editable_mode else self.build_lib
        self.copy_file("autoamp/cli/autoamp.pth", wheel)


setup(cmdclass={"build_py": BuildWithLists})
