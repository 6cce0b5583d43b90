"""Train fastai v1's language model and text classifier, as a program of 2020 does. It says nothing of precision.

    autoamp run --fastai1 examples/fastai_v1_text.py
    autoamp run --fastai1 --dtype fp16 examples/fastai_v1_text.py

The texts are those that come with Python and scikit-learn: paragraphs of docstrings and of the descriptions of data
sets, to be told apart by where they come from. First an AWD-LSTM learns to predict the next word, then its encoder
serves a classifier. Nothing is downloaded: there are no pretrained weights. Needs fastai:

    pip install -c constraints.txt -e '.[fastai1]' && pip install --no-deps fastai==1.0.61
"""

from __future__ import annotations

import argparse
import importlib
import re
import tempfile
import textwrap
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.basics import defaults
from fastai.text import (
    AWD_LSTM,
    BaseTokenizer,
    TextClasDataBunch,
    TextLMDataBunch,
    Tokenizer,
    awd_lstm_clas_config,
    awd_lstm_lm_config,
    language_model_learner,
    text_classifier_learner,
)
from fastai.utils.mod_display import progress_disabled_ctx

# Python's standard library, and scikit-learn.
SOURCES = {
    "python": "argparse asyncio collections configparser csv datetime decimal difflib doctest email.message ftplib "
    "functools heapq http.client inspect logging multiprocessing os pathlib pickletools random shutil smtplib socket "
    "statistics string subprocess tarfile tempfile textwrap threading unittest urllib.request zipfile",
    "sklearn": "calibration cluster covariance decomposition discriminant_analysis ensemble feature_extraction "
    "feature_selection gaussian_process impute isotonic linear_model manifold metrics mixture model_selection "
    "multiclass naive_bayes neighbors neural_network pipeline preprocessing svm tree",
}
SMALL = {"emb_sz": 48, "n_hid": 64, "n_layers": 2}


class WordTokenizer(BaseTokenizer):  # type: ignore[misc]  # fastai has no types
    """Words and punctuation; fastai's default tokenizer needs spacy."""

    def tokenizer(self, t: str) -> list[str]:
        """Return the tokens of a text."""
        return re.findall(r"\w+|[^\w\s]", t)


def paragraphs() -> pd.DataFrame:
    """Return a table of texts of 12 to 60 words and where each comes from, as many of each."""
    found = {}
    for label, names in SOURCES.items():
        texts: set[str] = set()
        for name in names.split():
            module = importlib.import_module(name if label == "python" else f"sklearn.{name}")
            owners = [module, *(value for value in vars(module).values() if callable(value))]
            docs = [getattr(owner, "__doc__", None) for owner in owners]
            for doc in docs:
                if isinstance(doc, str):
                    parts = (" ".join(part.split()) for part in textwrap.dedent(doc).split("\n\n"))
                    texts |= {part for part in parts if 12 <= len(part.split()) <= 60}
        found[label] = sorted(texts)
    rng, count = np.random.RandomState(0), min(map(len, found.values()))
    rows = [(text, label) for label, texts in found.items() for text in rng.permutation(texts)[:count]]
    return pd.DataFrame(rows, columns=["text", "label"]).sample(frac=1.0, random_state=0).reset_index(drop=True)


def data(frame: pd.DataFrame, path: str, tokenizer: Tokenizer, **options: Any) -> Any:
    """Return the data of a language model, or of a classifier where a vocabulary is given; a fifth is held out."""
    held_out = len(frame) // 5
    bunch = TextClasDataBunch if "vocab" in options else TextLMDataBunch
    columns = {"text_cols": "text", "label_cols": "label"}
    return bunch.from_df(path, frame[held_out:], frame[:held_out], tokenizer=tokenizer, **columns, **options)


def train_language_model(words: TextLMDataBunch, epochs: int) -> None:
    """Train it, print how well it predicts words, and save its encoder."""
    config = {**awd_lstm_lm_config, **SMALL}
    learner = language_model_learner(words, AWD_LSTM, config=config, drop_mult=0.3, pretrained=False, silent=True)
    with progress_disabled_ctx(learner) as learn:
        before = learn.validate()[0]
        learn.fit_one_cycle(epochs, 1e-2, moms=(0.8, 0.7))
        after, right = learn.validate()
        print(f"language model: loss {before:.2f} before, {after:.2f} after, accuracy {100 * float(right):.1f} %")
        print(learn.predict("This function returns", n_words=8))
        learn.save_encoder("encoder")


def train_classifier(labels: TextClasDataBunch, epochs: int) -> None:
    """Train it on that encoder, and print how well it tells texts apart."""
    config = {**awd_lstm_clas_config, **SMALL}
    learner = text_classifier_learner(labels, AWD_LSTM, config=config, drop_mult=0.3, pretrained=False, silent=True)
    with progress_disabled_ctx(learner) as learn:
        learn.load_encoder("encoder")
        learn.fit_one_cycle(1, 2e-2)
        learn.unfreeze()
        learn.fit_one_cycle(2 * epochs, slice(5e-3, 2e-2))
        right = float(learn.validate()[1])
        print(f"classifier: accuracy {100 * right:.1f} % on {len(labels.valid_ds)} held-out texts")
        text = "Returns an estimator that was fitted to the samples and the labels."
        print(f"{text!r} is of {learn.predict(text)[0]}")


def main() -> None:
    """Train both, and print how well they do on texts that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--texts", type=int, default=800, help="how many at most")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    defaults.cpus = 1
    frame, tokenizer = paragraphs()[: arguments.texts], Tokenizer(tok_func=WordTokenizer)
    with tempfile.TemporaryDirectory() as path:
        words = data(frame, path, tokenizer, bs=16, bptt=35)
        train_language_model(words, arguments.epochs)
        train_classifier(data(frame, path, tokenizer, bs=16, vocab=words.train_ds.vocab), arguments.epochs)


if __name__ == "__main__":
    main()
