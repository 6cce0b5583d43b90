"""The command line: what `autoamp run` sets up and tells, and `autoamp lists`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoamp.cli import main
from tests.launches import Ended, environment, launched, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

# What most programs share. `seen` has the dtypes of a linear layer's outputs within a model.
NET = """
import os, sys, torch
from torch import nn
seen = []
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        y = self.layer(x)
        seen.append(str(y.dtype).removeprefix("torch."))
        return y
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
def train(model, steps, x=torch.ones(2, 4), scale=1.0):
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x)
        (out.float().mean() * scale).backward()
        optimizer.step()
    return out
"""

TRAIN = """
from net import *
model = Model()
# A sixteenth, since the first loss scale leaves the range of fp16 by itself.
out = train(model, 4, scale=1 / 16)
print(out.dtype, tuple(model.layer.weight.grad[0, :2].tolist()))
"""

OVERFLOWS = """
from net import *
class Overflows(Model):
    def forward(self, x):
        big = self.layer(x).half() * 1000.0
        return (big * big).float()
torch.manual_seed(0)
train(Overflows(), 2)
"""

SCRIPTS = {
    "net.py": NET,
    # Most of what mixed precision would spoil, beside a model that trains.
    "tables.py": """
from net import *
class Rotary(Model):
    def __init__(self):
        super().__init__()
        frequencies = 1 / 10000 ** (torch.arange(0, 64, 2) / 64)
        self.table = torch.einsum("i,j->ij", torch.arange(2048.0), frequencies).cos()
        exact = torch.outer(torch.arange(2048.0).double(), frequencies.double()).cos()
        print((self.table - exact).abs().max().item() < 1e-3)
model = Rotary()
images = 200 + torch.randn(512, 8)
covariance = images.t() @ images
print(covariance.isfinite().all().item(), covariance.dtype)
projection = torch.linalg.qr(torch.randn(16, 16)).Q @ torch.randn(16, 16)
print(projection.dtype)
train(model, 2)
with torch.no_grad():
    print(model(torch.ones(2, 4)).numpy().dtype, *seen)
""",
    "sets_up.py": """
from net import *
from apex import amp
model = Model()
with torch.no_grad():
    model(torch.ones(2, 4))
model, optimizer = amp.initialize(model, sgd(model), opt_level="O1", verbosity=0)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().sum() / 16
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
print(*seen)
""",
    # As transformer-xl has it: a half model within one that casts, and losses in fp32.
    "fp16_optimizer.py": """
from net import *
class Half(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module.half()
        self.register_buffer("positions", torch.einsum("i,j->ij", torch.arange(4.0), torch.ones(4)).half())
    def forward(self, x):
        return self.module(x.half() + self.positions[:2]).float()
torch.manual_seed(0)
model = Half(nn.Sequential(Model(), nn.LayerNorm(4), nn.Linear(4, 4)))
from apex.fp16_utils import FP16_Optimizer
optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**20})
for _ in range(8):
    optimizer.zero_grad()
    out = model(torch.ones(2, 4))
    attention = torch.einsum("ij,kj->ik", out, out)
    optimizer.backward((out.sum() + attention.sum()) / 64)
    optimizer.step()
print(*set(seen), attention.dtype)
""",
    "by_hand.py": """
from net import *
model = Model()
for _ in range(3):
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
print(*seen, model.layer.weight.grad[0, 0].item())
""",
    "plain.py": TRAIN,
    "overflows.py": OVERFLOWS,
    "fails.py": TRAIN + "raise ValueError('wrong')\n",
    "refuses.py": "import argparse, torch\nargparse.ArgumentParser().parse_args(['--wrong'])\n",
    "exits.py": TRAIN + "sys.exit(256 + 5)\n",
    "terminated.py": TRAIN
    + "sys.stdout.flush()\nimport signal\nos.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()\n",
    "levels.py": """
import torch
from apex import amp
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer)
loss = model(torch.ones(2, 8)).float().sum() / 16
with amp.scale_loss(loss, optimizer) as scaled:
    scaled.backward()
optimizer.step()
print(model[0].weight.dtype, model[1].weight.dtype)
""",
    "no_apex.py": """
try:
    import apex
    print("autoamp" in apex.__file__)
except ImportError:
    print("no apex")
""",
    # A library's regions are seen when they are entered, as its source is not read.
    "by_library.py": """
from net import *
sys.path.append("site-packages")
import some_library
model = Model()
optimizer = sgd(model)
for _ in range(2):
    with some_library.region():
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 4))
print(*seen)
""",
    "site-packages/some_library.py": "import torch\ndef region():\n    return torch.autocast('cpu', torch.float16)\n",
    # Each child trains some steps; a product outside of modules stays in fp32.
    "children.py": """
from net import *
import torch.multiprocessing as mp
def work(steps):
    x = torch.ones(2, 2)
    assert (x @ x).dtype is torch.float32
    train(Model(), steps)
if __name__ == "__main__":
    how = sys.argv[1]
    if how == "os":
        work(1)
        for steps in (0, 2):
            if not os.fork():
                if steps:
                    work(steps)
                sys.exit()
            os.wait()
    elif how == "loader":
        # The workers, which are forks, cast too.
        list(torch.utils.data.DataLoader(range(4), num_workers=2, collate_fn=lambda _: work(1)))
        work(3)
    else:
        # Python waits for them at the end.
        for steps in (1, 2) if how == "fork" else (3,):
            mp.get_context(how).Process(target=work, args=(steps,)).start()
""",
    "own_init.py": 'import autoamp; print(autoamp.init(device_type="cpu", dtype="bf16").settings.dtype)',
    "turns_off.py": """
from net import *
import autoamp
autoamp.init(enabled=False)
model = torch.nn.Linear(2, 2)
loss = model(torch.ones(1, 2)).sum()
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print(loss.dtype)
""",
    "ends_own.py": """
from net import *
import autoamp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with autoamp.init(dtype="fp16", device_type="cpu", loss_scale=8.0) as handle:
    with handle.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
""",
    "own.toml": 'schema = 1\nextends = []\nfp32 = ["linear"]\n',
    "real/apex/__init__.py": "print('the real one')\n",
    "real/imports_apex.py": "import apex\n",
}

# A sixteenth of the mean of four outputs.
OUT = "torch.float32 (0.015625, 0.015625)\n"
RUN = ["run", "--device-type", "cpu"]
RUNS = {
    "plain": [*RUN, "plain.py"],
    "fp16": [*RUN, "--dtype", "fp16", "--loss-scale", "1024", "plain.py"],
    "report": [*RUN, "--dtype", "fp16", "--loss-scale", "dynamic", "--report", "report.json", "plain.py"],
    "traced": [*RUN, "--dtype", "fp16", "--trace-overflow", "overflows.py"],
    "fails": [*RUN, "--report", "fails.json", "fails.py"],
    "exits": [*RUN, "--report", "exits.json", "exits.py"],
    "terminated": [*RUN, "--report", "terminated.json", "terminated.py"],
    "refuses": [*RUN, "refuses.py"],
    **{f"rank {rank}": [f"RANK={rank}", *RUN, "--report", f"rank{rank}.json", "plain.py"] for rank in "01"},
    **{
        f"{name} {dtype}": [*RUN, "--dtype", dtype, f"{name}.py"]
        for dtype in ("fp16", "bf16")
        for name in ("tables", "fp16_optimizer", "by_hand")
    },
    **{how: [*RUN, "children.py", how] for how in ("os", "spawn", "fork", "forkserver", "loader")},
}
# By what they show: a command line, its exit code, its output, and what its standard error has.
TOLD: dict[str, tuple[list[str], int, str, str]] = {
    "O0 casts nothing": ([*RUN, "--opt-level", "O0", "plain.py"], 0, OUT, "autoamp: no casts (O0); "),
    "O2 is the level of an initialize that names none": (
        [*RUN, "--opt-level", "O2", "levels.py"], 0, "torch.float16 torch.float32\n",
        "autoamp: float16 on cpu (O2, set up by the program); parameters 72 float16, 16 float32, with fp32 masters; "
        "loss scale 65536; 0 of 1 steps skipped; ",
    ),
    "O2 casts nothing without initialize": (
        [*RUN, "--opt-level", "O2", "plain.py"], 0, OUT,
        "autoamp: no casts (O2): that level casts what a program gives to amp.initialize(), which was not called; ",
    ),
    "a program that calls initialize is cast before and after": (
        [*RUN, "--dtype", "fp16", "sets_up.py"], 0, "float16 float16 float16\n", "(O1, set up by the program)",
    ),
    "a dtype that the program overrules is told": (
        [*RUN, "--dtype", "fp16", "own_init.py"], 0, "torch.bfloat16\n",
        "own_init.py:1: UserWarning: --dtype fp16 has no effect from here on: the program made a handle itself, of "
        "bfloat16. Pass dtype=torch.float16 there, or leave the call to autoamp run",
    ),
    "O2 does not blame a program that turns autoamp off": (
        [*RUN, "--opt-level", "O2", "turns_off.py"], 0, "torch.float32\n",
        "autoamp: no casts (O2): turned off by the program; peak RSS",
    ),
    "a program that turns autoamp off is not told to have an optimizer": (
        [*RUN, "--dtype", "fp16", "turns_off.py"], 0, "torch.float32\n",
        "autoamp: float16 on cpu (O1, turned off by the program); ops 0; casts 0; peak RSS",
    ),
    "a program that ends its own handle has its steps counted": (
        [*RUN, "--dtype", "fp16", "ends_own.py"], 0, "",
        "autoamp: float16 on cpu (O1, set up by the program); ops 1 float16, 1 float32; casts 3 to float16; loss "
        "scale 8; 0 of 1 steps skipped; ",
    ),
    "a dtype that the program chooses too is no news": (
        [*RUN, "--quiet", "--dtype", "bf16", "own_init.py"], 0, "torch.bfloat16\n", ""
    ),
    "the alias is there": ([*RUN, "--quiet", "no_apex.py"], 0, "True\n", ""),
    "without the alias there is no apex": ([*RUN, "--quiet", "--no-apex", "no_apex.py"], 0, "no apex\n", ""),
    "a real apex takes the imports": (
        [*RUN, "--quiet", "real/imports_apex.py"], 0, "the real one\n",
        "/real/apex/__init__.py); autoamp adds what it lacks: ",
    ),
    "a real apex can be hidden": ([*RUN, "--quiet", "--shadow-apex", "real/imports_apex.py"], 0, "", ""),
    "regions of libraries rule from the first that trains": (
        [*RUN, "by_library.py"], 0, "float16 float32 float16 float32\n",
        "autoamp: float16 on cpu by the program's own torch.autocast;",
    ),
    "lists reach the program": ([*RUN, "--quiet", "--lists", "own.toml", "plain.py"], 0, OUT, ""),
    "children are quiet too": ([*RUN, "--quiet", "children.py", "spawn"], 0, "", ""),
    "torchrun is refused with what to do": (
        [*RUN, "-m", "torch.distributed.run", "--nproc-per-node=2", "plain.py"], 2, "",
        "use torchrun [its options] -m autoamp run [options] script.py",
    ),
    "a module that cannot be imported is named": (
        ["doctor", "--quick", "--import", "no_such_module"], 2, "", "--import no_such_module: ModuleNotFoundError: ",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run."""
    return written(tmp_path_factory.mktemp("programs"), SCRIPTS)


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Every command line: all are forks of one process, as the import of torch takes seconds."""
    return launched(folder, {**RUNS, **{name: argv for name, (argv, *_) in TOLD.items()}})


def one_line(one: Ended) -> str:
    """Return what a program said on standard error, with lines joined."""
    return " ".join(one.err.split())


@pytest.mark.parametrize("name", TOLD)
def test_a_command_ends_as_told(name: str, ended: dict[str, Ended]) -> None:
    _, code, out, said = TOLD[name]
    assert (ended[name].code, ended[name].out) == (code, out), ended[name].err
    assert said in one_line(ended[name])
    assert said or not ended[name].err


def test_plain_program_is_cast_scaled_and_summed_up_in_few_words(ended: dict[str, Ended]) -> None:
    assert ended["plain"].code == 0
    # Gradients are unscaled. The outputs of a model are fp32; what was cast is counted.
    assert ended["plain"].out == ended["fp16"].out == OUT
    assert "ops 4 bfloat16; casts 12 to bfloat16;" in one_line(ended["plain"])
    assert "ops 4 float16; casts 12 to float16;" in one_line(ended["fp16"])
    for name in ("plain", "fp16"):
        assert ended[name].err.count("autoamp: ") == 1
        assert len(ended[name].err.splitlines()) == 1
    assert ended["plain"].err.startswith("autoamp: bfloat16 on cpu (O1); ")
    assert ended["fp16"].err.startswith("autoamp: float16 on cpu (O1); ")
    assert "loss scale 1024;" in one_line(ended["fp16"])


def test_skips_are_explained_on_standard_error(ended: dict[str, Ended]) -> None:
    assert (ended["traced"].code, ended["traced"].out) == (0, "")
    line = OVERFLOWS[: OVERFLOWS.index("big * big")].count("\n") + 1
    explained = [text for text in ended["traced"].err.splitlines() if "made inf" in text]
    assert len(explained) == 2
    assert "mul in module Overflows" in explained[0]
    assert f"overflows.py:{line} made inf: it overflows in float16" in explained[0]
    assert "overflowed at loss scale" not in ended["fp16"].err


def test_report_has_what_the_summary_has_and_counts(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["report"].code == 0
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["versions"].keys() == {"autoamp", "torch", "python"}
    assert report["program"] == ["plain.py"]
    assert (report["device_type"], report["dtype"], report["opt_level"]) == ("cpu", "float16", "O1")
    assert (report["loss_scale"], report["steps"], report["skipped"], report["exit_code"]) == (65536.0, 4, 0, 0)
    assert report["seconds"] > 0
    assert not report["by_program"]
    # Four calls of linear: the input, the weight and the bias are cast for each.
    assert report["functions"]["torch.nn.functional.linear"] == {"float16": 4}
    assert report["casts"]["float16"] == 12
    # torch.profiler writes such lines to the terminal.
    assert "USDT" not in ended["report"].err


@pytest.mark.parametrize(("name", "code"), [("fails", 1), ("exits", 5)])
def test_summary_comes_last_however_the_program_ends(
    name: str, code: int, folder: Path, ended: dict[str, Ended]
) -> None:
    assert ended[name].code == code
    summary, written = f"\n{ended[name].err}".split("\nautoamp: ")[1:]
    assert summary.startswith("bfloat16 on cpu (O1); ")
    assert written == f"report written to {name}.json\n"
    assert json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["exit_code"] == code


def test_there_is_no_summary_where_the_program_refuses_its_arguments(ended: dict[str, Ended]) -> None:
    assert ended["refuses"].code == 2
    assert "unrecognized arguments: --wrong" in ended["refuses"].err
    assert "autoamp: " not in ended["refuses"].err


HALVES = pytest.mark.parametrize(("dtype", "name"), [("fp16", "float16"), ("bf16", "bfloat16")])


@HALVES
def test_tables_and_statistics_stay_fp32_and_the_model_is_cast(dtype: str, name: str, ended: dict[str, Ended]) -> None:
    one = ended[f"tables {dtype}"]
    assert one.code == 0, one.err
    assert one.out.splitlines() == ["True", "True torch.float32", "torch.float32", f"float32 {name} {name} {name}"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_programs_of_half_models_run_as_they_are(dtype: str, ended: dict[str, Ended]) -> None:
    one = ended[f"fp16_optimizer {dtype}"]
    assert (one.code, one.out) == (0, "float16 torch.float32\n"), one.err
    assert "which has FP16_Optimizer; loss scaling left to the program's FP16_Optimizer; " in one_line(one)
    found = re.search(r"; loss scale (\d+); (\d) of 8 steps skipped;", one_line(one))
    assert found is not None, one.err
    # The first scales overflow in fp16.
    assert int(found[2]) > 0
    assert int(found[1]) * 2 ** int(found[2]) == 2**20


@HALVES
def test_steps_by_hand_are_said_to_be_unscaled(dtype: str, name: str, ended: dict[str, Ended]) -> None:
    one = ended[f"by_hand {dtype}"]
    assert (one.code, one.out) == (0, f"{name} {name} {name} 2.0\n"), one.err
    assert "losses are not scaled, as no optimizer was seen;" in one_line(one)
    assert "steps skipped" not in one_line(one)


@pytest.mark.parametrize(("how", "ops"), [("os", 1), ("loader", 3), ("spawn", 0), ("fork", 0), ("forkserver", 0)])
def test_the_summary_is_of_the_first_process_alone(how: str, ops: int, ended: dict[str, Ended]) -> None:
    one = ended[how]
    assert (one.code, one.out) == (0, "")
    if ops:
        told = rf"ops {ops} bfloat16; casts \d to bfloat16; loss scale 1; 0 of {ops} steps skipped; peak RSS"
    else:
        told = "ops 0; casts 0; the processes that it started are not counted; peak RSS"
    assert re.match(rf"autoamp: bfloat16 on cpu \(O1\); {told}", one.err.splitlines()[-1])
    assert one.err.count("autoamp: ") == 1


def test_a_program_that_sigterm_ends_has_its_summary_and_report(folder: Path, ended: dict[str, Ended]) -> None:
    one = ended["terminated"]
    # Of the signal itself, as under plain Python.
    assert (one.code, one.out) == (-signal.SIGTERM, OUT)
    assert "autoamp: bfloat16 on cpu (O1); ops 4 bfloat16;" in one_line(one)
    report = json.loads((folder / "terminated.json").read_text(encoding="utf-8"))
    assert (report["exit_code"], report["steps"]) == (143, 4)


@pytest.mark.parametrize(("rank", "lines"), [("0", 2), ("1", 0)])
def test_only_the_first_rank_speaks(rank: str, lines: int, folder: Path, ended: dict[str, Ended]) -> None:
    one = ended[f"rank {rank}"]
    assert one.code == 0
    # torch's profiler, which a report samples with, has lines of its own on stderr.
    assert one.err.count("autoamp:") == lines
    assert (folder / f"rank{rank}.json").exists() == (rank == "0")


def test_torchrun_trains_on_two_processes(folder: Path) -> None:
    text = """
import atexit, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
# Under load, plain torch 2.13 now and then aborts as a process with a reducer ends: "terminate called without an active
# exception". Exit codes and the summary of the first rank are tested elsewhere.
atexit.register(os._exit, 0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).float().sum() / 16
loss.backward()
optimizer.step()
os.write(1, b"grad %g\\n" % model.module.weight.grad[0, 0])  # At once: both processes write to one pipe.
dist.destroy_process_group()
"""
    written(folder, {"ddp.py": text})
    argv = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d"]
    argv += ["--rdzv-endpoint=localhost:0", "-m", "autoamp", "run", "--device-type", "cpu", "--dtype", "fp16", "ddp.py"]
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    # A sixteenth of the mean over ranks of 2 samples of ones, and of twos.
    assert done.stdout.splitlines() == ["grad 0.1875", "grad 0.1875"]


def test_lists_are_shown_for_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    for device_type, policy in (("cpu", "none"), ("cuda", "fp32")):
        assert main(["lists", "--set", "bf16", "--device-type", device_type]) == 0
        rows = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
        assert rows["layer_norm"] == policy
