"""What fastai 1.0.61 needs on today's packages; `enable` tells of each.

Every shim writes to fastai's own modules and classes, never to torch or pandas, so no other code sees it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Sequence, Sized
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import numpy
import torch

from autoamp.core import PatchSet, imitate
from autoamp.errors import UsageError

log = logging.getLogger(__name__)

_SPACY = ("spacy", "spacy.symbols")


Shim = Callable[[PatchSet, Any], None]


class ModulePatches:
    """Patches of modules: in those that are imported, and in the others once they are.

    Args:
        shims: By the name of a module what patches it.
    """

    def __init__(self, shims: dict[str, Shim]) -> None:
        self._shims = shims
        self._patches = PatchSet()
        # Never restored: the import of a module may be under way, as by another thread, when patches are put in place.
        self._imports = PatchSet()
        self._awaited: set[str] = set()
        self._enabled = False

    def wait(self) -> None:
        """Wait for the imports of modules: each is patched at its end, if the patches are in place then."""
        for name in self._shims.keys() - self._awaited - sys.modules.keys():
            self._awaited.add(name)
            self._imports.when_imported(name, functools.partial(self._imported, name))

    def enable(self) -> None:
        """Put the patches in place. A second call does nothing."""
        if self._enabled:
            return
        self._enabled = True
        self.wait()
        for name in self._shims:
            if name not in self._awaited:
                self._apply(name, sys.modules[name])

    def disable(self) -> None:
        """Take the patches back."""
        self._enabled = False
        self._patches.restore()

    def _imported(self, name: str, module: types.ModuleType) -> None:
        self._awaited.discard(name)
        if self._enabled:
            self._apply(name, module)

    def _apply(self, name: str, module: types.ModuleType) -> None:
        with self._patches.all_or_nothing():
            self._shims[name](self._patches, module)


def replace(patches: PatchSet, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Patch ``owner.name``, a function, by what ``around`` makes of it."""
    original = vars(owner)[name]
    patches.replace(owner, name, imitate(around(original), original))


def _overlay(module: types.ModuleType, **names: Any) -> types.ModuleType:
    """Return a module that has these names, and all others of ``module``."""
    overlay = types.ModuleType(module.__name__)
    vars(overlay).update(names, __getattr__=functools.partial(getattr, module))
    return overlay


# -- torch.load --


def _load_whole_pickles(patches: PatchSet, module: Any) -> None:
    """Let ``load`` take whole pickles unless it is told otherwise, as `torch.load` did before 2.6."""

    def load(*args: Any, **kwargs: Any) -> Any:
        return torch.load(*args, **{"weights_only": False, **kwargs})

    if vars(module).get("torch") is torch:
        patches.replace(module, "torch", _overlay(torch, load=load))


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

    replace(patches, module.Categorify, "apply_train", lambda _: apply_train)
    replace(patches, module.Categorify, "apply_test", lambda _: apply_test)
    replace(patches, module, "make_date", lambda _: make_date)
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
    def around(original: Any) -> Any:
        def zero_gradients(self: Any) -> None:
            if "set_to_none" in inspect.signature(self.opt.zero_grad).parameters:
                self.opt.zero_grad(set_to_none=False)
            else:
                original(self)

        return zero_gradients

    replace(patches, module.OptimWrapper, "zero_grad", around)


def _solve_by_linalg(patches: PatchSet, module: Any) -> None:
    def solve(right: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.linalg.solve(matrix, right), None

    patches.replace(module, "_solve_func", solve)


# -- fastai.data_block, fastai.text --


def _ragged(original: Any) -> Any:
    def array(a: Any, dtype: Any = None, **kwargs: Any) -> Any:
        items: Any = a if isinstance(a, Sized) else list(a)
        try:
            return original(items, dtype=dtype, **kwargs)
        except ValueError:
            if dtype is not None or kwargs:
                raise
            return _of_objects(items)

    return array


def _permutation(x: Any) -> Any:
    """Do what `numpy.random.permutation` does, also with sequences of several lengths: one is one element then."""
    try:
        return numpy.random.permutation(x)
    except ValueError:
        return numpy.random.permutation(_of_objects(x))


def _of_objects(items: Sequence[Any]) -> Any:
    """Return a one-dimensional array of sequences. numpy 1.24 and later make none unasked if their lengths differ."""
    array = numpy.empty(len(items), dtype=object)
    array[:] = items
    return array


def _around_numpy(patches: PatchSet, module: Any) -> None:
    """Replace what makes ragged arrays, and numpy itself, which lacks names of types since 1.24: the builtins."""
    if vars(module).get("np") is numpy:
        random = _overlay(numpy.random, permutation=_permutation)
        old = _overlay(numpy, random=random, int=int, float=float, bool=bool, object=object)
        patches.replace(module, "np", old)
    if isinstance(vars(module).get("array"), types.FunctionType):
        replace(patches, module, "array", _ragged)


def _data_block(patches: PatchSet, module: Any) -> None:
    _load_whole_pickles(patches, module)
    _around_numpy(patches, module)


def _around_spacy(patches: PatchSet, module: Any) -> None:
    """Make the default tokenizer of what today's spacy takes: ``blank(disable=)`` is gone since 3.0."""
    if isinstance(module.spacy, _NoSpacy):
        for name in _SPACY:
            if sys.modules.get(name) is module.spacy:
                del sys.modules[name]
    elif int(module.spacy.__version__.partition(".")[0]) >= 3:

        def init(self: Any, lang: str) -> None:
            # A blank pipeline has no parser, tagger or entity recognizer that were to be disabled.
            self.tok = module.spacy.blank(lang)

        replace(patches, module.SpacyTokenizer, "__init__", lambda _: init)


_shims = ModulePatches({
    "fastai.basic_data": _load_whole_pickles,
    "fastai.basic_train": _load_whole_pickles,
    "fastai.data_block": _data_block,
    "fastai.text.data": _around_numpy,
    "fastai.text.learner": _load_whole_pickles,
    "fastai.text.transform": _around_spacy,
    "fastai.tabular.transform": _around_pandas,
    "fastai.callback": _keep_zero_gradients,
    "fastai.vision.transform": _solve_by_linalg,
})  # fmt: skip


# -- imports --


class _Preparation(importlib.abc.MetaPathFinder):
    """Prepares the imports of torchvision and of fastai.text.transform. It finds no module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Do what the module's import needs, and leave it to the other finders; see `importlib.abc.MetaPathFinder`."""
        spec = PathFinder.find_spec(fullname) if fullname == "torchvision" else None
        if spec is not None:
            _declare_operators(spec.submodule_search_locations or [])
        elif fullname == "fastai.text.transform" and not ("spacy" in sys.modules or importlib.util.find_spec("spacy")):
            # Until `_around_spacy` finds the module imported.
            sys.modules.update(dict.fromkeys(_SPACY, _NoSpacy("spacy")))
        return None


def _declare_operators(folders: Iterable[str]) -> None:
    """Declare the operators that the import of torchvision looks for, if its library does not load into this torch."""
    for library in [file for folder in folders for file in Path(folder).glob("_C.*")]:
        try:
            torch.ops.load_library(library)
        except OSError as error:
            log.info("torchvision's operators cannot be loaded beside this torch: %s", error)
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)


class _NoSpacy(types.ModuleType):
    """Stands for spacy, which fastai's default tokenizer alone needs, while fastai.text.transform is imported."""

    ORTH = "ORTH"

    def blank(self, lang: str, disable: Any) -> Any:
        """Say what is missing: fastai's default tokenizer calls this for ``spacy.blank``."""
        raise UsageError(
            f"fastai's default tokenizer needs spacy, which is not installed (spacy.blank({lang!r})): install it, or "
            "give a tokenizer of your own, as in Tokenizer(tok_func=BaseTokenizer)"
        )


def enable() -> None:
    """Let fastai 1.0.61 run on today's torch, numpy, pandas and torchvision. `disable` undoes it.

    It may be called before fastai is imported, or after; a second call does nothing. What it does, to fastai alone:

    - ``torch.load`` as fastai's own modules call it takes whole pickles again, as `Learner.load`, `load_learner` and
      ``lr_find`` need. Such a file runs code when it is loaded: load those that you trust.
    - ``Categorify`` assigns whole columns: pandas 2 keeps the old dtype when it assigns through ``df.loc``.
    - ``add_datepart`` finds the week, and seconds, in the dates of pandas 2 and later.
    - ``OptimWrapper.zero_grad`` keeps gradients as zeros, which ``AccumulateScheduler`` divides.
    - ``fastai.text`` and ``data_block`` make arrays of texts that have several lengths, which numpy refuses since 1.24.
    - ``fastai.text`` can be imported without spacy, and its ``SpacyTokenizer`` works with spacy 3. Without spacy give a
      tokenizer: ``Tokenizer(tok_func=BaseTokenizer)``, or a subclass of ``BaseTokenizer``.
    - ``get_transforms`` with a perspective warp solves by `torch.linalg.solve`.
    - torchvision's wheel from PyPI is built for CUDA: where a CPU torch cannot load its operators, the two that its
      import looks for are declared. `disable` leaves them declared, since an imported torchvision needs them.
    """
    if not any(isinstance(finder, _Preparation) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Preparation())
    _shims.enable()


def disable() -> None:
    """Undo `enable`: every patched attribute is again the object it was."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Preparation)]
    _shims.disable()
