"""Ranks whose settings differ are named at the first step: two processes over gloo serve all cases."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoamp
from tests.integration.spawned import run_ranks

CPU: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16}
# What rank 1 has otherwise than rank 0.
DIFFERENT: dict[str, dict[str, Any]] = {
    "same": {},
    "dtype": {"dtype": torch.bfloat16, "loss_scale": "dynamic"},
    "lists": {"lists": {"fp32": ["linear"]}},
    "scale": {"loss_scale": 128.0},
    "trace": {"trace_overflow": True},
    "version": {},
    "off": {"enabled": False},
}
# How ranks belong together.
KINDS = ("replicas", "shards", "asked")


def step(case: str, kind: str) -> str:
    """Take one step; returns the error, or how often a collective was called."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    handle: Any = autoamp.init(**{**CPU, "loss_scale": "dynamic", **(DIFFERENT[case] if rank else {})})
    model: Any = nn.Linear(4, 4)
    if kind == "shards":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif kind == "replicas":
        model = DistributedDataParallel(model)
    else:
        handle.sync_over(dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(torch.ones(2, 4)).float().mean()
    try:
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if kind == "shards" and not (rank and case == "off"):
            handle.clip_grad_norm_(optimizer, 1.0)
        if rank == 0 or case != "off":
            optimizer.step()
    except autoamp.AutoampError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        handle.deactivate()
    return f"stepped, {handle.skipped_steps} skipped"


def rank(index: int, folder: str) -> None:
    torch.set_num_threads(1)
    told: dict[Any, str] = {}
    for kind in KINDS:
        for case in DIFFERENT:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/{case}{kind}", rank=index, world_size=2,
                timeout=datetime.timedelta(seconds=6 if case == "off" else 60),
            )  # fmt: skip
            version = autoamp.__version__
            if case == "version" and index == 1:
                autoamp.__version__ = "0.0.9"
            told[case, kind] = step(case, kind)
            autoamp.__version__ = version
            Path(f"{folder}/{case}{kind}{index}.done").touch()
            while not Path(f"{folder}/{case}{kind}{1 - index}.done").exists():
                time.sleep(0.05)
            dist.destroy_process_group()
    torch.save(told, f"{folder}/{index}.pt")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], str]]:
    folder = tmp_path_factory.mktemp("digest")
    run_ranks(rank, (str(folder),), 2)
    return [torch.load(folder / f"{index}.pt") for index in range(2)]


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_differs_is_named(told: Any, kind: str) -> None:
    first, second = ({case: text for (case, found), text in told[index].items() if found == kind} for index in (0, 1))
    assert first["same"] == second["same"] == "stepped, 0 skipped"
    for case, message in {
        "dtype": "the half dtype differs between ranks that train together: torch.float16 on rank 0; torch.bfloat16 on",
        "lists": "the cast lists' entry for ",
        "scale": "loss scaler 0 differs between ranks that train together: DynamicLossScaler(loss_scale=65536.0",
        "trace": "trace_overflow differs between ranks that train together: False on rank 0; True on rank 1",
        "version": f"the version of autoamp differs between ranks that train together: {autoamp.__version__} on rank 0"
        "; 0.0.9 on rank 1. Give all of them the same",
    }.items():
        assert first[case] == second[case]
        assert first[case].startswith(f"UsageError: {message}"), first[case]
    assert "linear differs between ranks that train together: fp16 on rank 0; fp32 on rank 1" in first["lists"]
    assert first["off"].startswith("UsageError: rank 1 sent nothing at the first step, and rank 0 waits")
