"""fastai v1's text application under `init`, in the dtype that is given first: the example as it is, and its errors."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path

import torch

import autoamp
from autoamp.compat.fastai1 import training
from autoamp.runtime import runtime_of

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fastai_v1_text.py"

training.enable()
dtype_name = sys.argv[1]
handle = autoamp.init(dtype=getattr(torch, dtype_name), device_type="cpu")
assert isinstance(handle, autoamp.Handle)
counts = handle.count()
sys.argv = [str(EXAMPLE), *sys.argv[2:]]
program = runpy.run_path(str(EXAMPLE), run_name="__main__")
casts = dict(counts.casts)


def scale_of_to_fp16() -> float:
    """Train a language model by ``to_fp16``; return the last loss scale."""
    from fastai.text import AWD_LSTM, BaseTokenizer, Tokenizer, awd_lstm_lm_config, language_model_learner

    frame = program["paragraphs"]()[:60]
    with tempfile.TemporaryDirectory() as path:
        words = program["data"](frame, path, Tokenizer(tok_func=BaseTokenizer), bs=4, bptt=10)
        config = {**awd_lstm_lm_config, **program["SMALL"]}
        learn = language_model_learner(words, AWD_LSTM, config=config, pretrained=False, silent=True)
        learn.to_fp16(clip=0.1).fit(1)
    assert isinstance(handle, autoamp.Handle)
    return handle.loss_scale


def error_without_spacy() -> str:
    """Make the default tokenizer; return what is said."""
    from fastai.text import SpacyTokenizer

    try:
        SpacyTokenizer("en")
    except autoamp.UsageError as error:
        return str(error)
    return ""


found = {
    "casts": sum(count for (_, after), count in casts.items() if after == dtype_name),
    "steps": runtime_of(handle).optimizers.counts.steps,
    "to_fp16": scale_of_to_fp16(),
    "spacy": error_without_spacy(),
}
handle.deactivate()
training.disable()
print("\n" + json.dumps(found))
