"""fastai v1: tabular and collaborative learners, and one on images, with what today's pandas and torch need."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
import torch

import autoamp
from autoamp.compat import fastai1
from autoamp.core import runtime_of

fastai1.enable()
handle = autoamp.init(dtype=torch.float16, device_type="cpu")

from fastai.basics import Learner, accuracy, defaults, load_learner  # noqa: E402
from fastai.collab import CollabDataBunch, collab_learner  # noqa: E402
from fastai.layers import simple_cnn  # noqa: E402
from fastai.tabular import (  # noqa: E402
    Categorify,
    FillMissing,
    Normalize,
    TabularList,
    add_datepart,
    tabular_learner,
)
from fastai.utils.mod_display import progress_disabled_ctx  # noqa: E402
from fastai.vision import ImageDataBunch, get_transforms, imagenet_stats  # noqa: E402

defaults.device = torch.device("cpu")


def dates() -> list[list[float]]:
    """Return the week and the seconds since 1970 of two dates."""
    frame = pd.DataFrame({"day": ["2019-12-30", "2020-02-03"]})
    add_datepart(frame, "day", prefix="")
    return frame[["Week", "Elapsed"]].astype(float).to_numpy().tolist()  # type: ignore[no-any-return]


def table(rng: Any) -> dict[str, float]:
    """Train on a table with categories and missing values; return the accuracies, of an exported learner too."""
    count = 1200
    frame = pd.DataFrame({"a": rng.choice(list("xyz"), count), "b": rng.choice(["u", "v"], count)})
    frame["c"], frame["d"] = rng.randn(count), rng.randn(count)
    frame.loc[rng.rand(count) < 0.05, "d"] = np.nan
    side = frame.c + frame.d.fillna(0) + 1.5 * (frame.a == "x") - (frame.b == "u") > 0
    frame["y"] = np.where(side, "pos", "neg")
    path = tempfile.mkdtemp()
    items = TabularList.from_df(
        frame, cat_names=["a", "b"], cont_names=["c", "d"], procs=[FillMissing, Categorify, Normalize], path=path
    )
    data = items.split_by_idx(list(range(900, count))).label_from_df(cols="y").databunch(bs=64, num_workers=0)
    with progress_disabled_ctx(tabular_learner(data, layers=[32, 16], metrics=accuracy, silent=True)) as learn:
        learn.fit_one_cycle(6, 2e-2)
        learn.export()
        exported = load_learner(path)
        right = [str(exported.predict(frame.iloc[i])[0]) == frame.y[i] for i in range(900, 950)]
        return {"accuracy": float(learn.validate()[1]), "exported": sum(right) / len(right)}


def ratings(rng: Any) -> float:
    """Train embeddings of users and items; return the squared error in parts of the variance."""
    count, users, items = 3000, rng.randn(30), rng.randn(40)
    frame = pd.DataFrame({"user": rng.randint(0, 30, count), "item": rng.randint(0, 40, count)})
    frame["rating"] = (3 + users[frame.user] + items[frame.item]).clip(0, 5).astype(np.float32)
    data = CollabDataBunch.from_df(frame, seed=1, path=tempfile.mkdtemp(), bs=64, num_workers=0)
    learner = collab_learner(data, n_factors=8, y_range=(-0.5, 5.5), wd=1e-3, silent=True)
    with progress_disabled_ctx(learner) as learn:
        learn.fit_one_cycle(4, 5e-2)
        return float(learn.validate()[0]) / float(frame.rating.var())


def images(rng: Any) -> float:
    """Train on images that are warped in perspective; return the accuracy."""
    path = Path(tempfile.mkdtemp())
    for split, count in (("train", 60), ("valid", 20)):
        for channel, name in ((0, "red"), (2, "blue")):
            (path / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.randint(0, 80, (40, 40, 3)).astype(np.uint8)
                pixels[8:32, 8:32, channel] += np.uint8(rng.randint(60, 150))
                PIL.Image.fromarray(pixels).save(path / split / name / f"{i}.png")
    data = ImageDataBunch.from_folder(path, valid="valid", ds_tfms=get_transforms(), size=32, bs=20, num_workers=0)
    cnn = simple_cnn((3, 8, 16, 2), bn=True)
    with progress_disabled_ctx(Learner(data.normalize(imagenet_stats), cnn, metrics=accuracy, silent=True)) as learn:
        learn.fit_one_cycle(3, 2e-2)
        return float(learn.validate()[1])


torch.manual_seed(0)
np.random.seed(0)
state = np.random.RandomState(0)
found = {"dates": dates(), "table": table(state), "ratings": ratings(state), "images": images(state)}
assert isinstance(handle, autoamp.Handle)
steps = runtime_of(handle).optimizers.steps.guarded
print("\n" + json.dumps({**found, "steps": steps, "loss_scale": handle.loss_scale}))
