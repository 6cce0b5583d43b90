"""Running a script or module as ``__main__``, in a process that was set up first, and in the processes that it spawns.

The program finds what it would find under plain Python: its own ``sys.argv`` and ``sys.path[0]``, exit code, traceback
and signals. A child that multiprocessing spawns or that comes from a fork server is set up before it imports the
program; a forked one has everything already.
"""

from __future__ import annotations

import argparse
import errno
import importlib.machinery
import json
import multiprocessing.spawn
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from autoamp.cli.output import is_python
from autoamp.cli.startup import set_up_child
from autoamp.errors import UsageError

# Holds JSON for children: the options, and the module or else the path of the program.
_CHILD_VARIABLE = "AUTOAMP_RUN"

# The main module of children.
_CHILD_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child_main.py")


def prepared(chosen: argparse.Namespace, options: Mapping[str, Any]) -> Callable[[], None]:
    """Make this process look as under plain Python, and return a function that runs the program as ``__main__``.

    Call `take_path` first: a module is found on the program's own path. Exceptions of the program, SystemExit included,
    propagate from the returned function.

    Args:
        chosen: The parsed command line, with the program: the path of a script, or after ``-m`` the name of a module.
        options: Plain JSON values for children, which get them through the environment.

    Raises:
        UsageError: There is no such script or module.
    """
    main = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    vars(main)["__builtins__"] = sys.modules["builtins"]
    try:
        code = _module_code(chosen.program, main) if chosen.is_module else _script_code(chosen.program, main)
    except SyntaxError:
        _begin_tracebacks_at(vars(main))
        raise

    def run() -> None:
        sys.argv = [str(main.__file__) if chosen.is_module else chosen.program, *chosen.args]
        module = None if main.__spec__ is None else main.__spec__.name
        os.environ[_CHILD_VARIABLE] = json.dumps([dict(options), module, main.__file__])
        _prepare_children()
        sys.modules["__main__"] = main
        try:
            exec(code, vars(main))
        except BaseException:
            _begin_tracebacks_at(vars(main))
            raise

    return run


def take_path(chosen: argparse.Namespace) -> None:
    """Let ``sys.path`` begin as under plain Python. UsageError: there is no such script."""
    remedy = "give the path of a script, or -m a module"
    if not chosen.is_module and not os.path.exists(chosen.program):
        if is_python(chosen.program):
            # Not imported for a run.
            import shlex

            remedy = f"leave it out: autoamp {chosen.command} [options] {shlex.join(chosen.args) or 'script.py'}"
        raise UsageError(f"can't open file {chosen.program!r}: {os.strerror(errno.ENOENT)}; {remedy}")
    if not chosen.is_module and pkgutil.get_importer(chosen.program) is not None:
        raise UsageError(f"{chosen.program!r} is a directory or an archive, not a script; {remedy}")
    # Python's safe path leaves it out.
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if chosen.is_module else os.path.dirname(os.path.realpath(chosen.program))


def _script_code(path: str, main: types.ModuleType) -> types.CodeType:
    # Python makes the path of a script absolute, but in sys.argv.
    file = os.path.abspath(path)
    if file.endswith(".ipynb"):
        raise UsageError(
            f"{path!r} is a notebook, not a script; begin it with a cell of `%load_ext autoamp` and `%autoamp on`, "
            f"or make a script of it: jupyter nbconvert --to script {path}"
        )
    main.__file__ = file
    main.__loader__ = loader = importlib.machinery.SourceFileLoader("__main__", file)
    # As Python has it for a script: None, by which multiprocessing knows to look at the file.
    main.__spec__ = None
    vars(main)["__cached__"] = None
    try:
        return loader.source_to_code(loader.get_data(file), file)
    except OSError as error:
        raise UsageError(f"can't open file {path!r}: {error.strerror}") from None


def _module_code(name: str, main: types.ModuleType) -> types.CodeType:
    code: types.CodeType
    try:
        # What ``python -m`` calls, and pdb.
        _, spec, code = runpy._get_module_details(name, UsageError)  # type: ignore[attr-defined]
    except UsageError:
        remedy = "give a module, or a package with a __main__"
        raise UsageError(f"no module named {name!r} can be run; {remedy}") from None
    main.__file__ = spec.origin
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    vars(main)["__cached__"] = spec.cached
    return code


def _begin_tracebacks_at(names: dict[str, Any]) -> None:
    """Let the traceback begin where the program does. The exception itself goes on, and with it Python's exit code."""
    show = sys.excepthook

    def excepthook(kind: Any, error: Any, traceback: Any) -> None:
        inner = traceback
        while inner is not None and inner.tb_frame.f_globals is not names:
            inner = inner.tb_next
        # A program that does not compile has no frame.
        shown = None if inner is None and isinstance(error, SyntaxError) else inner or traceback
        # Python's own hook shows the traceback that the exception holds.
        show(kind, error.with_traceback(shown), shown)

    sys.excepthook = excepthook


def _prepare_children() -> None:
    """Let multiprocessing start its children with our file as their main module; see `names_of_main`."""
    original: Callable[..., dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if data.pop("init_main_from_name", None) or data.get("init_main_from_path"):
            data["init_main_from_path"] = _CHILD_MAIN
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def names_of_main() -> dict[str, Any]:
    """Set a child process up, import the program as ``__mp_main__`` and return its names."""
    main = sys.modules["__main__"]
    if main.__name__ == "__mp_main__":
        # A fork of a server that has imported the program: from Python 3.14 on multiprocessing's forkserver does so.
        return dict(vars(main))
    options, module, path = json.loads(os.environ[_CHILD_VARIABLE])
    set_up_child(options)
    # Grandchildren want the same.
    _prepare_children()
    if module is None:
        return runpy.run_path(path, run_name="__mp_main__")
    # As multiprocessing has it: the __main__ of a package is run, and not imported.
    return {} if module.endswith(".__main__") else runpy.run_module(module, run_name="__mp_main__", alter_sys=True)
