"""The options of `autoamp run`: read from text, and told to children as JSON."""

from __future__ import annotations

import json

import pytest

from autoamp.cli.options import Options, loss_scale_of


@pytest.mark.parametrize(("text", "scale"), [(None, None), ("dynamic", "dynamic"), ("128", 128.0), ("1e3", 1000.0)])
def test_loss_scale_is_read(text: str | None, scale: object) -> None:
    assert loss_scale_of(text) == scale


def test_options_survive_json() -> None:
    options = Options(dtype="bf16", lists=("a", "b.toml"), opt_level="O2", apex=False)
    assert Options.of(json.loads(json.dumps(options.as_dict()))) == options
    assert Options.of({"dtype": "fp16", "command": "run"}) == Options(dtype="fp16")
