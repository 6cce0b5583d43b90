"""The command line: what `autoamp run` sets up and tells, `autoamp doctor`, `autoamp lists`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoamp.cli import command, doctor, lists
from autoamp.cli.measurements import Measured, Spread
from tests.launches import Ended, environment, launched, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    out = model(torch.ones(2, 8))
    # A sixteenth, since the scale that fp16 begins with leaves the range by itself.
    (out.float().sum() / 16).backward()
    if step == 1 and "overflow" in sys.argv:
        model.weight.grad.fill_(float("inf"))
    optimizer.step()
print(out.dtype, tuple(model.weight.grad[0, :2].tolist()))
"""

OVERFLOWS = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        big = self.layer(x).half() * 1000.0
        return (big * big).float()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).mean().backward()
    optimizer.step()
"""

# Notes the dtype of a linear layer's output, within a model.
NOTES = """
import sys, torch
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
"""

SCRIPTS = {
    # Most of what mixed precision would spoil, beside a model that trains.
    "tables.py": NOTES
    + """
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 4)).backward()
    optimizer.step()
with torch.no_grad():
    print(model(torch.ones(2, 4)).numpy().dtype, *seen)
""",
    "sets_up.py": NOTES
    + """
from apex import amp
model = Model()
with torch.no_grad():
    model(torch.ones(2, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "--amp" in sys.argv:
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().sum() / 16
    if "--amp" in sys.argv:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    else:
        loss.backward()
    if "--evaluate" not in sys.argv:
        optimizer.step()
print(*seen)
""",
    # As transformer-xl has it: a half model within one that casts, and losses in fp32.
    "fp16_optimizer.py": NOTES
    + """
class Half(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module.half()
        self.register_buffer("positions", torch.einsum("i,j->ij", torch.arange(4.0), torch.ones(4)).half())
    def forward(self, x):
        return self.module(x.half() + self.positions[:2]).float()
torch.manual_seed(0)
model = Half(nn.Sequential(Model(), nn.LayerNorm(4), nn.Linear(4, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
try:
    from apex.fp16_utils import FP16_Optimizer
    optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)
except ImportError:
    raise
for _ in range(3):
    optimizer.zero_grad()
    out = model(torch.ones(2, 4))
    attention = torch.einsum("ij,kj->ik", out, out)
    optimizer.backward(out.sum() + attention.sum())
    optimizer.step()
print(*seen, attention.dtype)
""",
    # A half model and masters of the program's own.
    "half_by_hand.py": NOTES
    + """
model = Model().half()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)
for _ in range(3):
    model.zero_grad()
    out = model(torch.ones(2, 4).half())
    (out.float().sum() * 64).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float() / 64
    optimizer.step()
    for master, p in zip(masters, model.parameters()):
        p.data.copy_(master)
print(*seen, model.layer.weight.grad[0, 0].item())
""",
    "by_hand.py": NOTES
    + """
model = Model()
for _ in range(3):
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
print(*seen, model.layer.weight.grad[0, 0].item())
""",
    "spawns.py": NOTES
    + """
import torch.multiprocessing as mp
def child(rank, queue):
    x = torch.ones(2, 2)
    Model()(torch.ones(2, 4))
    queue.put(f"{(x @ x).dtype} {seen}")
if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(child, (queue,), nprocs=1)
    print(queue.get())
""",
    "plain.py": TRAIN,
    "overflows.py": OVERFLOWS,
    "fails.py": TRAIN + "raise ValueError('wrong')\n",
    "exits.py": TRAIN + "sys.exit(256 + 5)\n",
    "forks.py": TRAIN + "import os\nif os.fork():\n    os.wait()\nelse:\n    print('child')\n",
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
    print(apex.__file__)
except ImportError:
    print("no apex")
""",
    "autocast.py": """
import torch
model = torch.nn.Linear(8, 8)
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with torch.autocast("cpu", torch.bfloat16):
    loss = model(torch.ones(2, 8)).sum()
scaler.scale(loss).backward()
print(model.bias.grad[0].item() == 2 * scaler.get_scale())
scaler.step(optimizer)
scaler.update()
""",
    "late.py": "from torch import matmul\nTABLE = {'f': matmul}\ndef g(op=matmul):\n    return op\n",
    "real/apex/__init__.py": "print('the real one')\n",
    "imports_apex.py": "import apex\n",
}

RUN = ["run", "--device-type", "cpu"]
RUNS = {
    "plain": [*RUN, "plain.py"],
    "fp16": [*RUN, "--dtype", "fp16", "--loss-scale", "1024", "plain.py"],
    "report": [*RUN, "--dtype", "fp16", "--report", "report.json", "plain.py"],
    "traced": [*RUN, "--dtype", "fp16", "--trace-overflow", "overflows.py"],
    "fails": [*RUN, "--report", "fails.json", "fails.py"],
    "exits": [*RUN, "--report", "exits.json", "exits.py"],
    "forks": [*RUN, "forks.py"],
    "O0": [*RUN, "--opt-level", "O0", "plain.py"],
    "O2": [*RUN, "--opt-level", "O2", "levels.py"],
    "O2 plain": [*RUN, "--opt-level", "O2", "plain.py"],
    "O2 no apex": [*RUN, "--opt-level", "O2", "--no-apex", "levels.py"],
    "no apex": [*RUN, "--quiet", "--no-apex", "no_apex.py"],
    "apex": [*RUN, "--quiet", "no_apex.py"],
    "autocast": [*RUN, "--dtype", "bf16", "autocast.py"],
    "bad scale": [*RUN, "--loss-scale", "much", "plain.py"],
    "bad lists": [*RUN, "--lists", "no_such_set", "plain.py"],
    "bad device": ["run", "--device-type", "toaster", "plain.py"],
    "bad report": [*RUN, "--report", "no/such/dir/report.json", "plain.py"],
    "lists": [*RUN, "--quiet", "--lists", "own.toml", "plain.py"],
    "doctor": ["doctor", "--quick", "--device-type", "cpu", "--import", "late"],
    "doctor json": ["doctor", "--quick", "--json", "--device-type", "cpu", "--import", "late"],
    "doctor fails": ["doctor", "--quick", "--import", "no_such_module"],
    "show": ["lists", "--set", "own.toml"],
    "show typo": ["lists", "--set", "typo.toml"],
    "check": ["lists", "--check"],
}


# Programs of every kind, of which most know something of mixed precision.
PROGRAMS = {
    **{
        f"{name} {dtype}": [*RUN, "--dtype", dtype, f"{name}.py"]
        for dtype in ("fp16", "bf16")
        for name in (
            "tables",
            "fp16_optimizer",
            "half_by_hand",
            "by_hand",
            "sets_up",
        )
    },
    **{f"sets up {dtype}": [*RUN, "--dtype", dtype, "sets_up.py", "--amp"] for dtype in ("fp16", "bf16")},
    "sets up never": [*RUN, "--report", "waits.json", "sets_up.py", "--evaluate"],
    "spawns": [*RUN, "--quiet", "spawns.py"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run."""
    lists = {
        "own.toml": 'schema = 1\nextends = []\nfp32 = ["linear"]\n',
        "typo.toml": 'schema = 1\nextends = []\nfp32 = ["linaer"]\n',
    }
    return written(tmp_path_factory.mktemp("programs"), {**SCRIPTS, **lists})


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Every command line of RUNS."""
    return launched(folder, RUNS)


@pytest.fixture(scope="module")
def programs(folder: Path) -> dict[str, Ended]:
    """Every command line of PROGRAMS."""
    return launched(folder, PROGRAMS)


def test_plain_program_is_cast_scaled_and_summed_up_in_one_line(ended: dict[str, Ended]) -> None:
    assert ended["plain"].code == 0
    # Gradients are true ones: a sixteenth of the sum over two samples of ones.
    # What leaves a model is fp32; what was cast is counted.
    assert ended["plain"].out == "torch.float32 (0.125, 0.125)\n"
    assert ended["fp16"].out == "torch.float32 (0.125, 0.125)\n"
    assert "ops 4 bfloat16; casts 12 to bfloat16;" in ended["plain"].err
    assert "ops 4 float16, 4 float32; casts 12 to float16;" in ended["fp16"].err
    for name in ("plain", "fp16"):
        assert ended[name].err.count("\n") == 1
    assert ended["plain"].err.startswith("autoamp: bfloat16 on cpu (O1); ")
    assert ended["fp16"].err.startswith("autoamp: float16 on cpu (O1); ")
    assert "loss scale 1024;" in ended["fp16"].err


def test_skips_are_explained_on_standard_error(ended: dict[str, Ended]) -> None:
    assert (ended["traced"].code, ended["traced"].out) == (0, "")
    line = OVERFLOWS[: OVERFLOWS.index("big * big")].count("\n") + 1
    explained = [text for text in ended["traced"].err.splitlines() if "made inf" in text]
    assert len(explained) == 2
    assert "mul in module Model" in explained[0]
    assert f"overflows.py:{line} made inf: it overflows in float16" in explained[0]
    assert "overflowed at loss scale" not in ended["fp16"].err


def test_report_has_what_the_summary_has(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["report"].code == 0
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["versions"].keys() == {"autoamp", "torch", "python"}
    assert report["program"] == ["plain.py"]
    assert (report["device_type"], report["dtype"], report["opt_level"]) == ("cpu", "float16", "O1")
    assert (report["loss_scale"], report["steps"], report["skipped"], report["exit_code"]) == (65536.0, 4, 0, 0)
    assert report["seconds"] > 0
    assert not report["by_program"]


def test_report_counts_ops_and_casts(folder: Path, ended: dict[str, Ended]) -> None:
    assert ended["report"].code == 0
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    # Four calls of linear: the input, the weight and the bias are cast for each.
    assert report["functions"]["torch.nn.functional.linear"] == {"float16": 4}
    assert report["casts"]["float16"] == 12


@pytest.mark.parametrize(("name", "code"), [("fails", 1), ("exits", 5)])
def test_summary_comes_last_however_the_program_ends(
    name: str, code: int, folder: Path, ended: dict[str, Ended]
) -> None:
    assert ended[name].code == code
    assert ended[name].err.splitlines()[-1].startswith("autoamp: bfloat16 on cpu")
    assert ended[name].err.count("autoamp: ") == 1
    assert json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["exit_code"] == code


def test_a_fork_says_nothing_of_its_own(ended: dict[str, Ended]) -> None:
    assert "child" in ended["forks"].out
    assert ended["forks"].err.count("autoamp: ") == 1


def test_o0_casts_nothing(ended: dict[str, Ended]) -> None:
    assert ended["O0"].out == "torch.float32 (0.125, 0.125)\n"
    assert ended["O0"].err.startswith("autoamp: no casts (O0); ")


def test_o2_is_the_level_of_an_initialize_that_names_none(ended: dict[str, Ended]) -> None:
    assert ended["O2"].code == 0, ended["O2"].err
    assert ended["O2"].out == "torch.float16 torch.float32\n"
    assert ended["O2"].err.startswith("autoamp: float16 on cpu (O2, set up by the program); ")


def test_o2_without_initialize_casts_nothing_and_says_so(ended: dict[str, Ended]) -> None:
    assert ended["O2 plain"].out == "torch.float32 (0.125, 0.125)\n"
    assert "amp.initialize()" in ended["O2 plain"].err
    assert "O1" in ended["O2 plain"].err


def test_o2_without_the_alias_is_refused(ended: dict[str, Ended]) -> None:
    assert (ended["O2 no apex"].code, ended["O2 no apex"].out) == (2, "")
    assert "--no-apex is given" in ended["O2 no apex"].err


def test_alias_is_there_unless_unwanted(ended: dict[str, Ended]) -> None:
    assert "autoamp" in ended["apex"].out
    assert ended["no apex"].out == "no apex\n"


def test_program_that_scales_by_itself_is_left_to(ended: dict[str, Ended]) -> None:
    assert (ended["autocast"].code, ended["autocast"].out) == (0, "True\n")


HALVES = pytest.mark.parametrize(("dtype", "name"), [("fp16", "float16"), ("bf16", "bfloat16")])


@HALVES
def test_tables_and_statistics_stay_fp32_and_the_model_is_cast(
    dtype: str, name: str, programs: dict[str, Ended]
) -> None:
    one = programs[f"tables {dtype}"]
    assert one.code == 0, one.err
    assert one.out.splitlines() == ["True", "True torch.float32", "torch.float32", f"float32 {name} {name} {name}"]


@HALVES
def test_nothing_is_cast_before_amp_initialize(dtype: str, name: str, programs: dict[str, Ended]) -> None:
    assert programs[f"sets up {dtype}"].code == 0, programs[f"sets up {dtype}"].err
    assert programs[f"sets up {dtype}"].out == f"float32 {name} {name}\n"
    # Without the flag the first step tells that the call is not to come.
    assert programs[f"sets_up {dtype}"].out == f"float32 float32 {name}\n"
    assert f"autoamp: {name} on cpu (O1); ops " in programs[f"sets_up {dtype}"].err


def test_who_waits_to_the_end_is_told_so(folder: Path, programs: dict[str, Ended]) -> None:
    assert programs["sets up never"].out == "float32 float32 float32\n"
    assert "the program's source calls amp.initialize(), which was not called" in programs["sets up never"].err
    assert json.loads((folder / "waits.json").read_text(encoding="utf-8"))["waited_for"] == "amp.initialize"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_programs_of_half_models_run_as_they_are(dtype: str, programs: dict[str, Ended]) -> None:
    one = programs[f"fp16_optimizer {dtype}"]
    assert (one.code, one.out) == (0, "float16 float16 float16 torch.float32\n"), one.err
    assert "which has FP16_Optimizer;" in one.err
    assert "FP16_Optimizer: loss scale 128; 0 of 3 steps skipped;" in one.err
    by_hand = programs[f"half_by_hand {dtype}"]
    # Not scaled behind the program's back: 64 times the sum over two samples of ones.
    assert (by_hand.code, by_hand.out) == (0, "float16 float16 float16 128.0\n"), by_hand.err
    assert "casts left to the program, which has Model in float16;" in by_hand.err
    assert "loss scaling left to the program's Model in float16;" in by_hand.err


@HALVES
def test_steps_by_hand_are_said_to_be_unscaled(dtype: str, name: str, programs: dict[str, Ended]) -> None:
    one = programs[f"by_hand {dtype}"]
    assert (one.code, one.out) == (0, f"{name} {name} {name} 2.0\n"), one.err
    assert "losses are not scaled, as no optimizer was seen;" in one.err
    assert "steps skipped" not in one.err


def test_spawned_children_cast_by_module_too(programs: dict[str, Ended]) -> None:
    assert (programs["spawns"].code, programs["spawns"].out) == (0, "torch.float32 ['bfloat16']\n"), programs[
        "spawns"
    ].err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bad scale", "'much'"),
        ("bad lists", "no_such_set"),
        ("bad device", "toaster"),
        ("bad report", "--report"),
        ("show typo", "did you mean 'linear'"),
    ],
)
def test_wrong_options_are_told_in_one_line_before_the_program_runs(
    name: str, said: str, ended: dict[str, Ended]
) -> None:
    assert (ended[name].code, ended[name].out) == (2, "")
    assert ended[name].err.startswith("autoamp: ")
    assert ended[name].err.count("\n") == 1
    assert said in ended[name].err


def test_lists_are_checked_against_torch(ended: dict[str, Ended]) -> None:
    assert ended["check"].code == 0
    assert ended["check"].out.startswith(f"the shipped lists agree with torch {torch.__version__}: its public names, ")


def test_differences_of_the_lists_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = dataclasses.replace(lists.check_lists(), added=("brand_new",))
    monkeypatch.setattr(lists, "check_lists", lambda: found)
    assert command.main(["lists", "--check"]) == 1
    assert capsys.readouterr().out.startswith("brand_new: new in torch ")


def test_lists_reach_the_program(ended: dict[str, Ended]) -> None:
    assert ended["lists"].out == "torch.float32 (0.125, 0.125)\n"
    assert ended["lists"].err == ""


def test_a_real_apex_takes_the_imports_unless_hidden(folder: Path) -> None:
    runs = {"seen": [*RUN, "--quiet", "imports_apex.py"], "hidden": [*RUN, "--quiet", "--shadow-apex", "no_apex.py"]}
    path = os.pathsep.join([environment()["PYTHONPATH"], str(folder / "real")])
    ended = launched(folder, runs, PYTHONPATH=path)
    assert ended["seen"].out == "the real one\n"
    assert "--shadow-apex" in ended["seen"].err
    assert "the real one" not in ended["hidden"].out
    assert ended["hidden"].err == ""


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_only_the_first_rank_speaks(rank: str, lines: int, folder: Path) -> None:
    ended = launched(folder, {"one": [*RUN, "--report", f"rank{rank}.json", "plain.py"]}, RANK=rank)
    assert ended["one"].code == 0
    # torch's profiler, which a report samples with, has lines of its own on stderr.
    assert ended["one"].err.count("autoamp:") == lines
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


# -- doctor and lists --


def test_doctor_reads_well(ended: dict[str, Ended]) -> None:
    assert ended["doctor"].code == 0, ended["doctor"].err
    headings = [line for line in ended["doctor"].out.splitlines() if line and not line.startswith(" ")]
    assert headings == ["Packages", "Device", "Lists", "Names bound before init"]
    assert "late.matmul" in ended["doctor"].out
    assert "late.TABLE['f']" in ended["doctor"].out


def test_doctor_prints_json(ended: dict[str, Ended]) -> None:
    found = json.loads(ended["doctor json"].out)
    assert found["device"]["kind"] == "cpu"
    assert found["packages"]["apex"] is None
    assert found["lists"]["shipped"] == ["apex", "bf16", "default"]
    assert found["names"] == {"rebound": ["late.matmul"], "unreached": ["late.TABLE['f']", "late.g(op=)"]}
    assert found["measured"] == []


def test_doctor_tells_a_module_that_cannot_be_imported(ended: dict[str, Ended]) -> None:
    assert ended["doctor fails"].code == 2
    assert "no_such_module" in ended["doctor fails"].err


def test_doctor_prints_what_it_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = Spread(1.0, 0.9, 1.1)

    def measured(kind: str) -> list[Measured]:
        flops, rate = (Spread(x, x * 0.9, x * 1.1) for x in (5e12, 2e9))
        assert kind == "cpu"
        return [Measured(name, flops, rate, one, one, 256, 1000000) for name in ("fp32", "fp16")]

    monkeypatch.setattr(doctor, "measure", measured)
    assert command.main(["doctor", "--device-type", "cpu"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("  fp32  5", "  fp16  5"))]
    cells = ["5.0", "(4.5", "to", "5.5)", "1.00", "2.0", "(1.8", "to", "2.2)", "1.00"]
    assert rows == [[name, *cells] for name in ("fp32", "fp16")]
    assert "fp16 does not pay here" in out


def test_lists_are_shown_for_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    for device_type, policy in (("cpu", "none"), ("cuda", "fp32")):
        assert command.main(["lists", "--set", "bf16", "--device-type", device_type]) == 0
        rows = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
        assert rows["layer_norm"] == policy
    assert command.main(["lists", "--device-type", "toaster"]) == 2
    assert "device_type='toaster' is unknown to torch" in capsys.readouterr().err


def test_lists_show_each_rule_and_its_line(ended: dict[str, Ended], folder: Path) -> None:
    assert ended["show"].code == 0
    assert ended["show"].out.split() == ["linear", "fp32", f"{folder / 'own.toml'}:3"]
