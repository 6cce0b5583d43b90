"""Running a script or module as ``__main__``, in a process that was set up first, and in the processes that it spawns.

The program finds what it would find under plain Python: its own ``sys.argv`` and ``sys.path[0]``, exit code, traceback
and signals. A child that multiprocessing spawns or that comes from a fork server is set up before it imports the
program; a forked one has everything already.
"""

from __future__ import annotations

import argparse
import errno
import importlib.machinery
import importlib.util
import io
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

# Holds JSON for children: the options, and how to find their ``__main__``.
CHILD_VARIABLE = "AUTOAMP_RUN"

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
        _tell_children(chosen, options)
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
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        raise UsageError(f"can't open file {path!r}: {error.strerror}") from None
    main.__file__ = file
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    # As Python has it for a script: None, by which multiprocessing knows to look at the file.
    main.__spec__ = None
    vars(main)["__cached__"] = None
    code: types.CodeType = compile(source, file, "exec", dont_inherit=True)
    return code


def _module_code(name: str, main: types.ModuleType) -> types.CodeType:
    spec = _spec_of(name)
    loader: Any = None if spec is None else spec.loader
    code: types.CodeType | None = None if spec is None or loader is None else loader.get_code(spec.name)
    if spec is None or code is None:
        raise UsageError(f"no module named {name!r} can be run; give a module, or a package with a __main__")
    main.__file__ = spec.origin
    main.__loader__ = loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    vars(main)["__cached__"] = spec.cached
    return code


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        spec = None if name.startswith(".") else importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            # A package above the module was found, and imports something that was not.
            raise
        return None
    return spec


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


def _tell_children(chosen: argparse.Namespace, options: Mapping[str, Any]) -> None:
    """Let multiprocessing start its children with our file as their main module; see `names_of_main`."""
    os.environ[CHILD_VARIABLE] = json.dumps(
        {
            "options": dict(options),
            "program": chosen.program if chosen.is_module else os.path.abspath(chosen.program),
            "is_module": chosen.is_module,
        }
    )
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
    chosen = argparse.Namespace(**json.loads(os.environ[CHILD_VARIABLE]))
    set_up_child(chosen.options)
    # Grandchildren want the same.
    _tell_children(chosen, chosen.options)
    if not chosen.is_module:
        return runpy.run_path(chosen.program, run_name="__mp_main__")
    spec = _spec_of(chosen.program)
    if spec is None or spec.name.endswith(".__main__"):
        # As multiprocessing has it: the __main__ of a package is run, and not imported.
        return {}
    return runpy.run_module(chosen.program, run_name="__mp_main__", alter_sys=True)
