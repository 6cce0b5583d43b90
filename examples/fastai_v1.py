"""Train a fastai v1 tabular learner, in fp32 and in mixed precision: the learner's code is the same, and unmodified.

    python examples/fastai_v1.py

fastai 1.0.61 dates from 2020. `autoamp.compat.fastai1.enable()` lets it run on today's torch and pandas, and while
`autoamp.init()` is in force `fit_one_cycle` scales its losses by itself. Needs fastai:

    pip install -c constraints.txt -e '.[fastai1]' && pip install --no-deps fastai==1.0.61

The data are 569 real cases of scikit-learn's breast cancer table; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer

import autoamp
import autoamp.compat.fastai1

# fastai asks for pkg_resources, which warns of its end, and for pinned memory where there is no GPU.
warnings.filterwarnings("ignore", message="pkg_resources is deprecated|'pin_memory' argument")
autoamp.compat.fastai1.enable()

from fastai.basic_train import Learner  # noqa: E402
from fastai.metrics import accuracy  # noqa: E402
from fastai.tabular import Categorify, FillMissing, Normalize, TabularList, tabular_learner  # noqa: E402
from fastai.utils.mod_display import progress_disabled_ctx  # noqa: E402

CONTINUOUS = 20
BINNED = 5
TEST_CASES = 150


def load() -> pd.DataFrame:
    """Return 569 rows: 20 numbers, 5 categories in three bins each, and the diagnosis; a few numbers are missing."""
    bunch = load_breast_cancer(as_frame=True)
    table = bunch.frame.sample(frac=1.0, random_state=0).reset_index(drop=True)
    features = [str(name) for name in bunch.feature_names]
    frame = table[features[:CONTINUOUS]].copy()
    frame.iloc[::40, 0] = np.nan
    for name in features[CONTINUOUS : CONTINUOUS + BINNED]:
        frame[name] = pd.qcut(table[name], 3, labels=["low", "middle", "high"]).astype(str)
    frame["diagnosis"] = table["target"].map({0: "malignant", 1: "benign"})
    return frame


def learner_for(frame: pd.DataFrame, path: str, device: torch.device) -> Learner:
    """Return a learner, as a fastai program of 2020 makes it."""
    names = list(frame.columns[:-1])
    items = TabularList.from_df(
        frame, path=path, cat_names=names[CONTINUOUS:], cont_names=names[:CONTINUOUS],
        procs=[FillMissing, Categorify, Normalize],
    )  # fmt: skip
    labels = items.split_by_idx(list(range(TEST_CASES))).label_from_df(cols="diagnosis")
    data = labels.databunch(bs=64, num_workers=0, device=device)
    return tabular_learner(data, layers=[64, 32], metrics=accuracy, silent=True)


def train(epochs: int, seed: int, device: torch.device) -> float:
    """Train a learner and return its accuracy on cases that were held out, in percent."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    with tempfile.TemporaryDirectory() as path:
        learner = learner_for(load(), path, device).clip_grad(1.0)
        with progress_disabled_ctx(learner) as learn:
            learn.fit_one_cycle(epochs, 1e-2)
            learn.save("trained")
            learn.load("trained")
            return 100 * float(learn.validate()[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Train twice, and print both accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact = train(arguments.epochs, arguments.seed, device)
    print(f"fp32:  accuracy {exact:.2f} % on {TEST_CASES} held-out cases")
    handle = autoamp.init(dtype=getattr(torch, arguments.dtype), device_type=device.type)
    mixed = train(arguments.epochs, arguments.seed, device)
    skipped, scale = handle.skipped_steps, handle.loss_scale
    handle.deactivate()
    print(f"mixed: accuracy {mixed:.2f} %, {skipped} steps skipped, loss scale {scale:g}")


if __name__ == "__main__":
    main()
