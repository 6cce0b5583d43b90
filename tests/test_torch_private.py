"""Private names of torch: one file asks for them, and the package works without any one of them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoamp import torch_private

PACKAGE = Path(torch_private.__file__).parent
# Torch's own public optimizers are made of these.
ALLOWED = ("torch._foreach_",)

# Takes one name after the other away, each in a child of its own: imports autoamp, puts the name back, since torch
# itself needs it, and trains. Prints by name what came of it.
PROGRAM = """
import contextlib, gc, json, os, signal, sys, traceback, types
import torch, torch.jit, torch.utils.checkpoint, torch.nn.parallel.data_parallel, torch._dynamo, torch.distributed


class Without:
    def __init__(self, whole, name):
        self.whole, self.name = whole, name

    def __getattr__(self, name):
        if name == self.name:
            raise AttributeError(name)
        return getattr(self.whole, name)


def take_away(path):
    parts = path.split(".")
    parts = parts[:4] if parts[1] == "ops" else parts
    owner, name = torch, parts[-1]
    for part in parts[1:-1]:
        owner = getattr(owner, part)
    if parts[1] == "ops":
        torch.ops.mkldnn = Without(owner, name)
        return lambda: setattr(torch.ops, "mkldnn", owner)
    value = getattr(owner, name)
    if name == "BackwardCFunction":
        # torch makes every class of an autograd function by it, those of autoamp's modules too.
        init = owner.FunctionMeta.__init__
        own = types.FunctionType(init.__code__, dict(vars(owner)), "__init__", init.__defaults__, init.__closure__)
        owner.FunctionMeta.__init__ = own
    delattr(owner, name)

    def put_back():
        setattr(owner, name, value)
        # Where this is gone torch's recurrent layers do without it too.
        if name == "_VF":
            torch.nn.modules.rnn._VF = torch

    return put_back


def touch(path):
    # Torch makes its operators when they are first asked for, and needs names of these lists itself for that.
    found = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.lstm = torch.nn.LSTM(64, 16, batch_first=True)
        self.first, self.last, self.layer_norm = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4), torch.nn.LayerNorm(32)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(2)
        x = self.lstm(x)[0].mean(1)
        for reentrant in (False, True):
            x = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=reentrant)
        return self.last(self.layer_norm(Double.apply(self.first(x))))


def pieces():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 3, 8, 8), torch.randint(4, (5,))


def train(context):
    model, optimizer, x, y = pieces()
    losses = []
    with context(model, optimizer) as scale:
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x).float(), y)
            with scale(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def smoke():
    import autoamp
    from autoamp import torch_private

    linear = torch.nn.functional.linear

    @contextlib.contextmanager
    def explicit(model, optimizer):
        handle = autoamp.init(dtype=torch.bfloat16, loss_scale="dynamic", device_type="cpu")
        yield handle.scale_loss
        handle.deactivate()

    @contextlib.contextmanager
    def unasked(model, optimizer):
        handle = autoamp.init(dtype=torch.float16, device_type="cpu")
        try:
            scaling = handle.auto_scale()
        except autoamp.UsageError as refused:
            # Without the numbers of backward passes it is refused.
            assert "_current_graph_task_id" in str(refused) and not torch_private.TELLS_GRAPH_TASKS
            scaling = contextlib.nullcontext()
        with scaling:
            yield lambda loss, optimizer: contextlib.nullcontext(loss)
        handle.deactivate()

    @contextlib.contextmanager
    def halves(model, optimizer):
        autoamp.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, device_type="cpu", verbosity=0)
        yield autoamp.scale_loss
        autoamp.current_handle().deactivate()

    found = {"explicit": train(explicit), "unasked": train(unasked), "O2": train(halves)}
    model, _, x, _ = pieces()
    model.eval()
    with autoamp.init(dtype=torch.bfloat16, device_type="cpu").inference(model), torch.no_grad():
        found["inference"] = [model(x).float().sum().item(), model(x).float().sum().item()]
        layer = torch.nn.Linear(64, 64)
        with autoamp.current_handle().inference(layer):
            wide = torch.linspace(-1, 1, 64 * 64).view(64, 64)
            found["packed"] = [float(torch.func.vmap(layer)(wide).shape[0]), float(layer(wide).shape[1])]
    handle = autoamp.current_handle()
    for start in (handle.trace, handle.profile_ranges):
        with start():
            handle.count()
        found[f"after {start.__name__}"] = [float(linear is not torch.nn.functional.linear)]
    handle.deactivate()
    found["restored"] = [float(torch.nn.functional.linear is linear)]
    return found


def child(path):
    put_back = take_away(path) if path else (lambda: None)
    import autoamp
    from autoamp import torch_private

    put_back()
    # What is not asked for once it is gone has another name in its place.
    if path in torch_private.ASKED and path not in torch_private.MISSING:
        raise SystemExit(f"{path} is not missed")
    return smoke()


asked = json.loads(sys.argv[1])
for path in asked:
    touch(path)
# What is compiled and looked up at first use is inherited by the children.
for half in (torch.float16, torch.bfloat16):
    with torch.autocast("cpu", half):
        train(lambda *_: contextlib.nullcontext(lambda loss, _: contextlib.nullcontext(loss)))
    Net().to(half)(torch.randn(5, 3, 8, 8, dtype=half)).float().sum().backward()
torch.func.vmap(torch.nn.Linear(64, 64))(torch.ones(64, 64))
# A child that looked through what is there by now, for garbage, would copy all of it.
gc.freeze()
for path in [None, *asked]:
    sys.stdout.flush()
    if os.fork() == 0:
        signal.alarm(120)  # Whoever hangs ends, and is missed by its name.
        try:
            print(json.dumps([path, child(path)]))
        except BaseException:
            print(json.dumps([path, traceback.format_exc()]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "torch_private.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
                elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
                    names = [ast.unparse(node)]
                found += [
                    f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"
                    for name in names
                    if re.search(r"\._(?!_)", name) and re.fullmatch(r"[\w.]+", name) and not name.startswith(ALLOWED)
                ]
    assert found == []


def test_this_torch_has_them_all() -> None:
    assert torch_private.MISSING == []


@pytest.fixture(scope="module")
def outcomes() -> dict[str | None, object]:
    """What came of each program that lacks a name, by the name; under None with all of them."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(torch_private.ASKED)]
    # A forked child that asks for the threads of its parent's OpenMP pool waits for them without end.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("path", torch_private.ASKED)
def test_works_without(path: str, outcomes: dict[str | None, object]) -> None:
    expected, found = outcomes[None], outcomes.get(path, "it ended without a word")
    assert isinstance(expected, dict), expected
    assert isinstance(found, dict), found
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=0.03), name
