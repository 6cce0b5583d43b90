"""The shims that need no fastai: ragged arrays, numpy's old names, spacy. tests/clients runs them in fastai itself."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import autoamp
from autoamp.apex.fastai1 import shims

SOURCES = {
    "data_block": """
import numpy as np

def array(a, dtype=None, **kwargs):
    return np.array(list(a), dtype=dtype, **kwargs)
""",
    "text/data": "import numpy as np\nfrom ..data_block import array\n",
    "text/transform": """
import spacy
from spacy.symbols import ORTH

class SpacyTokenizer:
    def __init__(self, lang):
        self.tok = spacy.blank(lang, disable=["parser", "tagger", "ner"])
""",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `fastai` of that much, with the shims in place."""
    for name in ("", "text"):
        (tmp_path / "fastai" / name).mkdir()
        (tmp_path / "fastai" / name / "__init__.py").touch()
    for name, source in SOURCES.items():
        (tmp_path / "fastai" / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("fastai", "spacy")
    }
    shims.enable()
    yield
    shims.disable()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fastai", "spacy")]:
        del sys.modules[name]
    sys.modules |= before


def without_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be found under that name."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "spacy" else find_spec(name))


def test_sequences_of_several_lengths_become_an_array_of_objects(modules: None) -> None:
    block = importlib.import_module("fastai.data_block")
    ragged = block.array(np.arange(count) for count in (1, 2, 3))
    assert ragged.shape == (3,)
    assert [len(item) for item in ragged] == [1, 2, 3]
    assert block.array([[1, 2], [3, 4]]).shape == (2, 2)
    assert block.array(["a", "bc"]).dtype.kind == "U"
    assert block.array([1, 2], dtype=np.float32).dtype == np.float32
    shims.disable()
    with pytest.raises(ValueError, match="inhomogeneous"):
        block.array([[1], [2, 3]])


def test_numpys_old_names_are_there_for_fastai_alone(modules: None) -> None:
    data = importlib.import_module("fastai.text.data")
    assert data.np.zeros(2, dtype=data.np.int).dtype == np.zeros(2, dtype=int).dtype
    assert data.np.array(["a"], dtype=data.np.object).dtype == object
    assert data.np.float64 is np.float64
    assert data.array([[1], [2, 3]]).dtype == object
    assert not hasattr(np, "int")
    shims.disable()
    assert data.np is np


def test_sequences_of_several_lengths_are_permuted(modules: None) -> None:
    data = importlib.import_module("fastai.text.data")
    chunks = [np.arange(3), np.arange(3), np.arange(1)]
    np.random.seed(0)
    mixed = data.np.random.permutation(chunks)
    np.random.seed(0)
    order = np.random.permutation(np.array([0, 1, 2], dtype=object))
    assert [len(chunk) for chunk in mixed] == [len(chunks[at]) for at in order]
    assert sorted(data.np.random.permutation(4)) == [0, 1, 2, 3]


def test_text_can_be_imported_without_spacy(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    without_spacy(monkeypatch)
    transform = importlib.import_module("fastai.text.transform")
    assert "spacy" not in sys.modules
    shims.disable()
    shims.enable()
    with pytest.raises(autoamp.UsageError, match=r"Tokenizer\(tok_func=BaseTokenizer\)"):
        transform.SpacyTokenizer("en")


@pytest.mark.parametrize("version", ["2.3.9", "3.8.1"])
def test_tokenizer_is_made_as_each_spacy_wants_it(modules: None, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    spacy, symbols = types.ModuleType("spacy"), types.ModuleType("spacy.symbols")
    old, new = (lambda lang, disable: (lang, disable)), (lambda lang: f"blank {lang}")
    vars(spacy).update(__version__=version, blank=new if version[0] == "3" else old)
    vars(symbols)["ORTH"] = 65
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    monkeypatch.setitem(sys.modules, "spacy.symbols", symbols)
    transform = importlib.import_module("fastai.text.transform")
    if version[0] == "2":
        assert transform.SpacyTokenizer("en").tok == ("en", ["parser", "tagger", "ner"])
        return
    assert transform.SpacyTokenizer("en").tok == "blank en"
    shims.disable()
    with pytest.raises(TypeError, match="disable"):
        transform.SpacyTokenizer("en")
