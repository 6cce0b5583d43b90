"""Which steps are explained: later ones, those whose flags stay on the device, and those of one of two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
import torch

from autoamp.core import UnreadFlags, runtime_of
from autoamp.errors import NonFiniteGradientsError
from autoamp.tools import Communication, HalfPrecisionOp
from tests.launches import launched
from tests.tools.faults import Net, found_in, line_of, mean_square, squared, started, take_step


@pytest.mark.parametrize("traced", [False, True])
def test_skips_whose_flags_stay_on_the_device(traced: bool) -> None:
    """A fused optimizer decides by a flag on its device, which the host reads at once if the step was recorded."""
    handle = started("dynamic", traced=traced)
    scaler = runtime_of(handle).optimizers.scalers[0]
    scaler.unread = UnreadFlags(("cpu",))
    active = [False]
    net = Net(lambda h: squared(h) if active[0] else h)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

    def step(fault: bool) -> int:
        active[0] = fault
        take_step(handle, net, optimizer, lambda out: mean_square(out) * 1e-3)
        return len(scaler.unread)

    assert [step(False), step(True)] == ([0, 0] if traced else [1, 2])
    assert handle.stats["found_inf"] == [1]
    assert (handle.stats["steps"], handle.stats["skipped"], handle.stats["last_step_skipped"]) == (2, 1, True)
    assert len(handle.overflows) == traced
    # A skip that is known late has the next steps recorded all the same, until one is clean.
    assert step(True) == 0
    found = found_in(handle)
    assert isinstance(found.verdict, HalfPrecisionOp)
    assert (found.op, found.iteration, found.location) == ("mul", 2, line_of(squared, "big * big"))
    assert step(False) == 0
    assert step(False) == (0 if traced else 1)


def test_the_error_after_many_skips_carries_the_finding() -> None:
    handle, net = started("dynamic"), Net(squared)
    handle.max_consecutive_skips = 2
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    take_step(handle, net, optimizer)
    with pytest.raises(NonFiniteGradientsError, match="mul in module faulty") as caught:
        take_step(handle, net, optimizer)
    assert caught.value.overflow is handle.last_overflow


WORKER = """
import json, os, sys
import torch, torch.distributed as dist
import autoamp

class Net(torch.nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out.half() * 1e6 if self.bad else out

child = os.fork()
os.environ["RANK"] = "0" if child else "1"
dist.init_process_group("gloo")
rank, told = dist.get_rank(), []
# In the second run one rank does not trace.
for traced, steps, bad in ((True, 3, [1]), (rank == 0, 4, [2, 3])):
    torch.manual_seed(0)
    handle = autoamp.init(device_type="cpu", dtype=torch.float16, loss_scale=64.0, trace_overflow=traced)
    net = Net(4, 4)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        net.bad = rank == 1 and step in bad
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().pow(2).mean()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    told += [handle.skipped_steps, handle.last_overflow.to_dict()]
    handle.deactivate()
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forks")
def test_an_overflow_of_one_rank_is_explained_on_that_rank(tmp_path: Path) -> None:
    with socket.socket() as probe, contextlib.closing(probe):
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    group = ["WORLD_SIZE=2", "MASTER_ADDR=localhost", f"MASTER_PORT={port}"]
    ended = launched(tmp_path, {"ranks": [*group, "python", str(script), str(tmp_path)]})["ranks"]
    assert ended.code == 0, ended.err
    clean, faulty = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (clean[0], faulty[0]) == (1, 1)
    assert clean[1]["verdict"] == {"type": Communication.__name__}
    assert clean[1]["iteration"] == 1
    assert "trace overflows on all ranks" in clean[1]["suggestion"]
    assert faulty[1]["kind"] == "half_precision_op"
    assert (faulty[1]["op"], faulty[1]["phase"]) == ("mul", "forward")
    assert faulty[1]["location"] == f"{script.name}:9"
    assert (clean[2], faulty[2]) == (2, 2)
    # It was not asked to trace, and looks on since its first skip.
    assert faulty[3]["location"] == f"{script.name}:9"
    assert clean[3]["kind"] == "communication"
