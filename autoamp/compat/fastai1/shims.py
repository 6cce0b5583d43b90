"""What fastai 1.0.61 needs on today's packages; `autoamp.compat.fastai1.enable` tells of each.

Every shim writes to fastai's own modules and classes, never to torch or pandas, so no other code sees it.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable, Sequence, Sized
from importlib.machinery import ModuleSpec
from typing import Any

import numpy
import torch

from autoamp.errors import UsageError
from autoamp.patching import PatchSet, imitate

__all__ = ["disable", "enable"]

log = logging.getLogger(__name__)

_OPERATORS = ("nms", "qnms")


class _Shims:
    """The patches of fastai's modules, and the import finder. A process has one of these."""

    def __init__(self) -> None:
        self._patches = PatchSet()
        self._finder: _Finder | None = None

    def enable(self) -> None:
        if self._finder is not None:
            return
        self._finder = _Finder()
        sys.meta_path.insert(0, self._finder)
        for name, shim in _SHIMS.items():
            module = sys.modules.get(name)
            if module is None:
                self._patches.when_imported(name, self._applier(shim))
            else:
                self._applier(shim)(module)

    def disable(self) -> None:
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None
        self._patches.restore()

    def _applier(self, shim: _Shim) -> Callable[[types.ModuleType], None]:
        def apply(module: types.ModuleType) -> None:
            with self._patches.all_or_nothing():
                shim(self._patches, module)

        return apply


_Shim = Callable[[PatchSet, Any], None]


# -- torch.load --


class _Torch(types.ModuleType):
    """torch, as a module of fastai sees it: ``load`` takes whole pickles unless it is told otherwise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load a file as `torch.load` did before 2.6."""
        return torch.load(*args, **{"weights_only": False, **kwargs})


def _load_whole_pickles(patches: PatchSet, module: Any) -> None:
    if vars(module).get("torch") is torch:
        patches.replace(module, "torch", _Torch("torch"))


# -- fastai.tabular --


def _around_pandas(patches: PatchSet, module: Any) -> None:
    """Replace what reads or writes tables by ways that pandas 2 changed. With an older pandas it does nothing."""
    pandas: Any = sys.modules["pandas"]
    if int(pandas.__version__.partition(".")[0]) < 2:
        return

    def apply_train(self: Any, df: Any) -> None:
        self.categories = {}
        for name in self.cat_names:
            df[name] = df[name].astype("category").cat.as_ordered()
            self.categories[name] = df[name].cat.categories

    def apply_test(self: Any, df: Any) -> None:
        for name in self.cat_names:
            df[name] = pandas.Categorical(df[name], categories=self.categories[name], ordered=True)

    def make_date(df: Any, date_field: str) -> None:
        column = df[date_field]
        if not pandas.api.types.is_datetime64_any_dtype(column):
            column = pandas.to_datetime(column)
        # fastai counts on nanoseconds where it computes the seconds.
        df[date_field] = column.dt.as_unit("ns")

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (module.Categorify, "apply_train", apply_train),
        (module.Categorify, "apply_test", apply_test),
        (module, "make_date", make_date),
    )
    for owner, name, replacement in replaced:
        patches.replace(owner, name, imitate(replacement, vars(owner)[name], owner.__name__, name))
    # add_datepart asks pandas by `getattr(field.dt, "week")`; a global of its module goes before the builtin.
    patches.replace(module, "getattr", _getattr_with_week)


def _getattr_with_week(value: Any, name: str, *default: Any) -> Any:
    if name == "week" and not hasattr(value, name) and hasattr(value, "isocalendar"):
        week = value.isocalendar().week
        # As pandas gave it: whole numbers, or floats where a date is missing.
        return week.astype("float64" if week.isna().any() else "int64")
    return getattr(value, name, *default)


# -- fastai.callback, fastai.vision --


def _keep_zero_gradients(patches: PatchSet, module: Any) -> None:
    original = module.OptimWrapper.zero_grad

    def zero_gradients(self: Any) -> None:
        if "set_to_none" in inspect.signature(self.opt.zero_grad).parameters:
            self.opt.zero_grad(set_to_none=False)
        else:
            original(self)

    replacement: Any = zero_gradients
    patches.replace(module.OptimWrapper, "zero_grad", imitate(replacement, original, module.__name__, "zero_grad"))


def _solve_by_linalg(patches: PatchSet, module: Any) -> None:
    def solve(right: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.linalg.solve(matrix, right), None

    patches.replace(module, "_solve_func", solve)


# -- fastai.data_block, fastai.text --


def _ragged(original: Any) -> Any:
    def array(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
        items = a if isinstance(a, Sized) or hasattr(a, "__array_interface__") else list(a)
        if dtype is None and not kwargs and _is_ragged(items):
            return _of_objects(items)
        return original(items, dtype=dtype, **kwargs)

    return array


def _is_ragged(items: Any) -> bool:
    """Whether these are sequences of several lengths, of which numpy 1.24 and later make no array unasked."""
    if not isinstance(items, (list, tuple)) or not all(
        isinstance(item, (list, tuple, numpy.ndarray)) for item in items
    ):
        return False
    return len({len(item) for item in items}) > 1


def _of_objects(items: Sequence[Any]) -> Any:
    """Return a one-dimensional array whose elements are these sequences."""
    array = numpy.empty(len(items), dtype=object)
    array[:] = items
    return array


class _Numpy(types.ModuleType):
    """numpy, as fastai's modules of data see it: with the names of types that left it in 1.24."""

    # What these names stood for: the builtins.
    int, float, bool, object = int, float, bool, object

    def __init__(self) -> None:
        super().__init__("numpy")
        self.random = _Random("numpy.random")

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)


class _Random(types.ModuleType):
    """numpy.random, as fastai sees it: sequences of several lengths can be permuted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy.random, name)

    def permutation(self, x: Any) -> Any:
        """Return them in a random order, one sequence an element."""
        return numpy.random.permutation(_of_objects(x) if _is_ragged(x) else x)


def _around_numpy(patches: PatchSet, module: Any) -> None:
    """Replace what makes ragged arrays, and numpy itself. With an older numpy it does nothing."""
    if numpy.lib.NumpyVersion(numpy.__version__) < "1.24.0":
        return
    if vars(module).get("np") is numpy:
        patches.replace(module, "np", _Numpy())
    original = vars(module).get("array")
    if isinstance(original, types.FunctionType):
        patches.replace(module, "array", imitate(_ragged(original), original, module.__name__, "array"))


def _data_block(patches: PatchSet, module: Any) -> None:
    _load_whole_pickles(patches, module)
    _around_numpy(patches, module)


def _around_spacy(patches: PatchSet, module: Any) -> None:
    """Make the default tokenizer of what today's spacy takes: ``blank(disable=)`` is gone since 3.0."""
    if getattr(module.spacy, "__version__", "2").split(".")[0] in ("1", "2"):
        return

    def init(self: Any, lang: str) -> None:
        # A blank pipeline has no parser, tagger or entity recognizer that were to be disabled.
        self.tok = module.spacy.blank(lang)

    owner = module.SpacyTokenizer
    patches.replace(owner, "__init__", imitate(init, vars(owner)["__init__"], owner.__name__, "__init__"))


_SHIMS: dict[str, _Shim] = {
    "fastai.basic_data": _load_whole_pickles,
    "fastai.basic_train": _load_whole_pickles,
    "fastai.data_block": _data_block,
    "fastai.text.data": _around_numpy,
    "fastai.text.learner": _load_whole_pickles,
    "fastai.text.transform": _around_spacy,
    "fastai.tabular.transform": _around_pandas,
    "fastai.callback": _keep_zero_gradients,
    "fastai.vision.transform": _solve_by_linalg,
}


# -- imports --


class _Finder:
    """Gives torchvision and fastai.text.transform, when they are imported, loaders that know what these lack here."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with another loader; see `importlib.abc.MetaPathFinder`."""
        loader = _LOADERS.get(fullname)
        if loader is None or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Another loader, for a subclass to go around its `exec_module`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """Make the module; see `importlib.abc.Loader`."""
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module


class _SecondTry(_Loader):
    """Declares torchvision's operators where its import says that they are not there, and imports it once more."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, a second time if it lacks an operator."""
        fresh = dict(vars(module))
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            vars(module).clear()
            vars(module).update(fresh)
            for operator in _OPERATORS:
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", schema)
            log.info("torchvision's operators cannot be loaded beside this torch: %s", error)
            self._loader.exec_module(module)


class _WithoutSpacy(_Loader):
    """Lets fastai.text.transform be imported where spacy is not installed, which its default tokenizer alone needs."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, beside a stand-in for spacy that is there for that time alone."""
        if "spacy" in sys.modules or importlib.util.find_spec("spacy") is not None:
            self._loader.exec_module(module)
            return
        spacy, symbols = _NoSpacy("spacy"), types.ModuleType("spacy.symbols")
        vars(symbols)["ORTH"] = "ORTH"
        sys.modules |= {"spacy": spacy, "spacy.symbols": symbols}
        try:
            self._loader.exec_module(module)
        finally:
            for name in ("spacy", "spacy.symbols"):
                sys.modules.pop(name, None)


class _NoSpacy(types.ModuleType):
    """What fastai.text has in place of spacy where that is not installed."""

    __version__ = "3"

    def blank(self, lang: str) -> Any:
        """Say what is missing; fastai's default tokenizer calls this."""
        raise UsageError(
            f"fastai's default tokenizer needs spacy, which is not installed (spacy.blank({lang!r})): install it, or "
            "give a tokenizer of your own, as in Tokenizer(tok_func=BaseTokenizer)"
        )


_LOADERS: dict[str, type[_Loader]] = {"torchvision": _SecondTry, "fastai.text.transform": _WithoutSpacy}


_shims = _Shims()


def enable() -> None:
    """Put every shim in place, in the modules that are imported and in those to come."""
    _shims.enable()


def disable() -> None:
    """Take all shims back."""
    _shims.disable()
