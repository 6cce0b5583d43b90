"""A clean step of a program that asked for nothing: what only looks on runs no frame, and leaves nothing in torch."""

from __future__ import annotations

import json
import os

import pytest

from tests.launches import Ended, launched, written

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="these programs run in forks")

# The packages of what looks on.
LOOKS = ("diagnostics", "tape", "tuning", "tools", "cli")
# The first steps find the loss scale, what to guard, and why a run casts nothing.
PROGRAM = f"""
import json, os, sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
import autoamp
ROOT = os.path.dirname(os.path.abspath(autoamp.__file__)) + os.sep
RANDOM = ("get_rng_state", "set_rng_state", "fork_rng")
found = {{"frames": [], "modes": 0, "draws": [], "hooks": []}}
calls = 0
def hear(frame, event, arg):
    global calls
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(ROOT):
        calls += 1
        if code.co_filename[len(ROOT):].split(os.sep)[0] in {LOOKS!r}:
            found["frames"].append(code.co_qualname)
    if event == "call" and code.co_name in RANDOM:
        found["draws"].append(code.co_name)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    def forward(self, x):
        y = F.softmax(self.norm(self.first(x)), -1)
        found["modes"] += len(function_modes()) + len(dispatch_modes())
        return self.last(torch.cat([y, x], 0)[: len(x)] * 2)
kind = sys.argv[1]
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, labels = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
handle = None
if kind in ("bf16", "fp16"):
    handle = autoamp.init(dtype=kind, device_type="cpu")
elif kind in ("O1", "O2"):
    model, optimizer = autoamp.initialize(model, optimizer, opt_level=kind, dtype="fp16", verbosity=0)
    handle = autoamp.current_handle()
elif kind == "auto_scale":
    autoamp.init(dtype="fp16", device_type="cpu", scope="modules").auto_scale()
def step():
    optimizer.zero_grad()
    outputs = model(x)
    if outputs._backward_hooks:
        found["hooks"].append("outputs")
    loss = F.cross_entropy(outputs.float(), labels)
    if handle is None:
        loss.backward()
    else:
        with autoamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    optimizer.step()
for number in range(7):
    if number == 5:
        found["modes"], found["hooks"], before = 0, [], torch.get_rng_state()
        sys.setprofile(hear)
    step()
    if number == 5:
        sys.setprofile(None)
        if not torch.equal(before, torch.get_rng_state()):
            found["draws"].append("state")
        found["hooks"] += [name for name in vars(hooks) if name.startswith("_global_forward") and getattr(hooks, name)]
        found["hooks"] += [name for one in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")
                           if kind != "O2" and getattr(one, name)]
now = autoamp.current_handle()
assert now.stats["skipped"] == 0, now.stats
print(json.dumps([found, calls]))
"""
RUN = ["run", "--device-type", "cpu"]
RUNS = {
    **{kind: ["python", "step.py", kind] for kind in ("bf16", "fp16", "O1", "O2", "auto_scale")},
    "run": [*RUN, "--dtype", "bf16", "step.py", "run"],
    "run in fp16": [*RUN, "--dtype", "fp16", "step.py", "run"],
    "run with a report": [*RUN, "--dtype", "fp16", "--report", "report.json", "step.py", "run"],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every kind of program."""
    return launched(written(tmp_path_factory.mktemp("programs"), {"step.py": PROGRAM}), RUNS)


@pytest.mark.parametrize("kind", [kind for kind in RUNS if kind != "run with a report"])
def test_nothing_looks_on_at_a_clean_step_unasked(kind: str, ended: dict[str, Ended]) -> None:
    assert ended[kind].code == 0, ended[kind].err
    found, calls = json.loads(ended[kind].out)
    assert found == {"frames": [], "modes": 0, "draws": [], "hooks": []}
    assert calls > 0


def test_the_profile_sees_what_looks_on_where_that_is_asked_for(ended: dict[str, Ended]) -> None:
    assert ended["run with a report"].code == 0, ended["run with a report"].err
    found, _ = json.loads(ended["run with a report"].out)
    assert found["frames"]
