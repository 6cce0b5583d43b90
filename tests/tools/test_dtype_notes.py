"""Notes on torch's errors about dtypes: each names the tensors, and a remedy that makes the program run."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import autoamp
from tests.apex.levels.shared import initialize

Forward = Callable[..., Tensor]


class Part(nn.Module):
    """A module with this forward, and modules in it."""

    def __init__(self, forward: Forward, *parts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.function = forward
        self.parts = nn.ModuleList([make() for make in parts])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), part, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)))  # type: ignore[no-any-return]


def train(net: nn.Module, level: str, half: torch.dtype, lists: Any = None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    initialize(net, optimizer, opt_level=level, dtype=half, lists=lists, loss_scale=8.0)
    step(net, optimizer)


def step(net: nn.Module, optimizer: Any) -> None:
    loss = net(torch.rand(16, 8)).float().square().mean()
    with autoamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def note_on(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call()
    (note,) = getattr(caught.value, "__notes__", ())
    assert note.startswith("autoamp: ")
    return str(note)


# -- O2 and O3: what O1 runs, runs; what torch cannot know, such as a kernel of the program's, is told the entry --


def complex_view(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 4, 2)) * 1j).flatten(1)


def clip_quantile(x: Tensor) -> Tensor:
    return x.clamp(max=torch.quantile(x, 0.9))


def fp32_state(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x[None], torch.zeros(1, x.shape[0], 8))[0][0]  # type: ignore[no-any-return]


def fp32_cell_state(x: Tensor, cell: nn.Module) -> Tensor:
    return cell(x, torch.zeros(x.shape[0], 8))  # type: ignore[no-any-return]


def experts(x: Tensor, probabilities: Tensor, parts: tuple[nn.Module, ...]) -> Tensor:
    out, (weights, chosen) = torch.zeros_like(x), probabilities.topk(1)
    for number, part in enumerate(parts):
        rows = (chosen[:, 0] == number).nonzero()[:, 0]
        out.index_add_(0, rows, part(x[rows]) * weights[rows])
    return out


def router_of_fp32(x: Tensor, router: nn.Module, *parts: nn.Module) -> Tensor:
    return experts(x, router(x.float()).softmax(-1), parts)


def softmax_in_fp32(x: Tensor, router: nn.Module, *parts: nn.Module) -> Tensor:
    return experts(x, router(x).softmax(-1, dtype=torch.float32), parts)


def scatter_into_fp32(x: Tensor) -> Tensor:
    return torch.zeros(x.shape).scatter_add(0, torch.zeros(x.shape, dtype=torch.long), x)


def write_into_fp32(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    out[torch.arange(x.shape[0])] = x
    return out


def masked(x: Tensor) -> Tensor:
    return x.clone().masked_scatter_(x > 0, torch.zeros(x.numel()))


def fp32_ones(x: Tensor, conv: nn.Module) -> Tensor:
    return conv(torch.cat([x[:, None], torch.ones(x.shape[0], 1, 8)], 1)).mean(1)  # type: ignore[no-any-return]


def sample(x: Tensor) -> Tensor:
    return F.grid_sample(x[None, None], torch.zeros(1, 16, 8, 2), align_corners=False)[0, 0]


def linear() -> nn.Module:
    return nn.Linear(8, 8)


# By name: the forward, the modules in it, and the module that is to be fp32.
PROGRAMS: dict[str, tuple[Forward, list[Callable[[], nn.Module]], str]] = {
    "view_as_complex": (complex_view, [], "part"),
    "fft": (lambda x: torch.fft.irfft(torch.fft.rfft(x), n=8), [], "part"),
    "quantile": (clip_quantile, [], "part"),
    "inv": (lambda x: x @ torch.linalg.inv(torch.eye(8) + x.T @ x), [], "part"),
    "cholesky": (lambda x: x + torch.linalg.cholesky(x.T @ x + 10 * torch.eye(8).to(x)).sum(), [], "part"),
    "svd": (lambda x: torch.linalg.svdvals(x).sum() * x, [], "part"),
    "qr": (lambda x: torch.linalg.qr(x)[0], [], "part"),
    "polar": (lambda x: torch.polar(x.abs(), x).real, [], "part"),
    "einsum": (lambda x: torch.einsum("bi,ij->bj", x, torch.eye(8)), [], "part"),
    "rnn": (fp32_state, [lambda: nn.RNN(8, 8)], "part.parts.0"),
    "gru_cell": (fp32_cell_state, [lambda: nn.GRUCell(8, 8)], "part.parts.0"),
    "router": (router_of_fp32, [lambda: nn.Linear(8, 2), linear, linear], "part.parts.0"),
    "index_add": (softmax_in_fp32, [lambda: nn.Linear(8, 2), linear, linear], "part"),
    "scatter_add": (scatter_into_fp32, [], "part"),
    "index_put": (write_into_fp32, [], "part"),
    "masked_scatter": (masked, [], "part"),
    "conv": (fp32_ones, [lambda: nn.Conv1d(2, 4, 3, padding=1)], "part.parts.0"),
    "grid_sample": (sample, [], "part"),
    "fp32 result": (lambda x: x.float() * 2, [], "last"),
    "numpy": (lambda x: x * float(x.detach().numpy().max()), [], "part"),
}


@torch.library.custom_op("dtype_notes::same", mutates_args=())
def same(one: Tensor, other: Tensor) -> Tensor:
    """As ops of torchvision have it: nms, roi_align."""
    if one.dtype is not other.dtype:
        raise RuntimeError("dets should have the same type as scores")
    return one.clone()


PROGRAMS["torchvision"] = (lambda x: x + same(x.detach(), torch.zeros(2)).mean(), [], "part")
PROGRAMS["checkpoint"] = (
    lambda x: torch.utils.checkpoint.checkpoint(torch.fft.fft, x, use_reentrant=False).real,  # type: ignore[no-any-return]
    [],
    "part",
)

# Those that are told the entry: numpy has no bf16, and the set for half models has no op of others.
TOLD = {("numpy", torch.bfloat16), ("torchvision", torch.float16), ("torchvision", torch.bfloat16)}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_half_model_runs_or_is_told_the_entry_that_makes_it_run(name: str, level: str, half: torch.dtype) -> None:
    forward, parts, path = PROGRAMS[name]
    if (name, half) not in TOLD:
        train(Net(Part(forward, *parts)), level, half)
        return
    note = note_on(lambda: train(Net(Part(forward, *parts)), level, half))
    lists = re.search(r"lists=(\{.*\})\)$", note)
    assert lists is not None
    assert eval(lists[1]) == {"modules": {path: "fp32"}}
    assert f" is {half}" in note
    train(Net(Part(forward, *parts)), level, half, eval(lists[1]))


def test_a_class_of_several_modules_is_told_and_not_the_path_of_one(half: torch.dtype) -> None:
    def net() -> nn.Module:
        return nn.Sequential(*(Part(lambda x: x + same(x, torch.zeros(2)).mean()) for _ in range(3)), nn.Linear(8, 8))

    note = note_on(lambda: train(net(), "O2", half))
    entry = '{"modules": {"tests.tools.test_dtype_notes.Part": "fp32"}}'
    assert note.endswith(f"initialize(..., lists={entry})")
    train(net(), "O2", half, eval(entry))


def test_a_weight_that_initialize_cast_is_never_said_to_be_made_half_by_the_program(half: torch.dtype) -> None:
    layer = nn.Linear(8, 8)
    initialize(layer, opt_level="O2", dtype=half)
    outer = Part(lambda x: same(layer.weight, x) + x)
    outer.add_module("layer", layer)
    assert "layer.weight, cast by initialize()" in note_on(lambda: outer(torch.rand(8, 8)))


# -- the line that made the wide tensor --


def alibi(x: Tensor) -> Tensor:
    distance = torch.arange(8)[None] - torch.arange(8)[:, None]
    bias = 2.0**-8 * distance  # here
    return same(x, bias)


def random_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(0)
    if x.shape[1] == 8:
        mask = torch.rand(  # here
            8, 8
        )
        return same(x, mask)
    return x


def renamed(x: Tensor) -> Tensor:
    ones = torch.ones(8)  # here
    other = ones
    for _ in range(2):
        x = through(x, other)
    return x


def through(x: Tensor, *wide: Tensor) -> Tensor:
    return same(x, *wide)


def inline(x: Tensor) -> Tensor:
    return through(x, torch.ones(8))  # here


def checkpointed(x: Tensor) -> Tensor:
    wide = torch.ones(8)  # here
    return torch.utils.checkpoint.checkpoint(lambda x: same(x, wide), x, use_reentrant=False)  # type: ignore[no-any-return]


def converted(x: Tensor) -> Tensor:
    wide = torch.ones(8)  # here
    return through_no_op(x, wide)


def through_no_op(x: Tensor, wide: Tensor) -> Tensor:
    again = wide.to(torch.float32)
    return same(x, again)


MADE = {
    "made": [alibi, random_mask, renamed, checkpointed, converted],
    "passed": [inline],
}


@pytest.mark.parametrize(("how", "forward"), [(how, one) for how, functions in MADE.items() for one in functions])
def test_the_line_that_made_the_wide_tensor_is_told(how: str, forward: Forward, half: torch.dtype) -> None:
    lines, first = inspect.getsourcelines(forward)
    line = first + next(number for number, text in enumerate(lines) if "# here" in text)
    assert f"is torch.float32 ({how} at {__file__}:{line}" in note_on(lambda: train(Net(Part(forward)), "O2", half))


def either(x: Tensor) -> Tensor:
    wide = torch.ones(8)
    if x.shape[0] == 0:
        wide = torch.zeros(8)
    return same(x, wide)


def later_in_a_loop(x: Tensor) -> Tensor:
    wide: Any = x
    for _ in range(2):
        x = same(x, wide)
        wide = torch.ones(8)
    return x


def of_a_closure(x: Tensor) -> Tensor:
    def made() -> Forward:
        wide = torch.ones(8)
        return lambda x: same(x, wide)

    return made()(x)


@pytest.mark.parametrize("forward", [either, later_in_a_loop, of_a_closure])
def test_where_several_lines_may_have_made_it_the_variable_is_told(forward: Forward, half: torch.dtype) -> None:
    note = note_on(lambda: train(Net(Part(forward)), "O2", half))
    assert re.search(rf"is torch.float32 \(the variable wide of ({forward.__name__})?", note)


def test_a_wide_buffer_of_the_model_is_told_by_its_name(half: torch.dtype) -> None:
    net = Net(Part(lambda x: same(x, net.part.factor)))  # type: ignore[arg-type]
    net.part.register_buffer("factor", torch.tensor(1.0))
    assert "is torch.float32 (the model's part.factor); " in note_on(lambda: train(net, "O2", half))


def test_a_line_of_the_model_itself_is_told_the_level_that_runs_it(half: torch.dtype) -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + same(x, torch.zeros(2)).sum()

    note = note_on(lambda: train(Root(8, 8), "O2", half))
    assert 'use opt_level="O1"' in note
    train(Root(8, 8), "O1", half)


def test_an_adapter_that_came_later_in_fp32_runs(half: torch.dtype) -> None:
    def adapted(base: nn.Module) -> nn.Module:
        base.add_module("adapter", nn.Linear(8, 8))
        base.register_forward_hook(lambda module, _, output: output + module.adapter(output))
        return base

    net = Net(nn.Identity())
    train(net, "O2", half)
    adapted(net.first)
    assert net(torch.rand(4, 8)).isfinite().all()


# -- O1 and init() --


def start(half: torch.dtype, **options: Any) -> autoamp.Handle:
    return autoamp.init(device_type="cpu", dtype=half, **options)


def test_an_op_on_no_list_is_told_the_override(half: torch.dtype) -> None:
    handle, model = start(half), Net(Part(write_into_fp32))
    note = note_on(lambda: model(torch.rand(4, 8)))
    assert re.search(rf"x is {half} \(computed by addmm, which is fp16 by .*default.toml:\d+\)", note)
    call = note.rpartition(" by ")[2]
    with eval(call, {"autoamp": autoamp, "model": model}):
        model(torch.rand(4, 8))
    handle.deactivate()


def test_a_model_within_another_that_was_called_past_it_is_named(half: torch.dtype) -> None:
    start(half)
    flow = nn.ModuleList([Net(Part(write_into_fp32))])
    note = note_on(lambda: flow[0](torch.rand(4, 8)))
    assert ", where model is the Net that was called, by " in note
    with eval(note.rpartition(" by ")[2], {"autoamp": autoamp, "model": flow[0]}):
        flow[0](torch.rand(4, 8))


def test_at_o1_the_entry_is_one_of_initialize(half: torch.dtype) -> None:
    note = note_on(lambda: train(Net(Part(write_into_fp32)), "O1", half))
    assert note.endswith('keep part in fp32 by initialize(..., lists={"modules": {"part": "fp32"}})')
    train(Net(Part(write_into_fp32)), "O1", half, {"modules": {"part": "fp32"}})


def test_outside_of_modules_the_conversion_is_told(half: torch.dtype) -> None:
    start(half)
    x, wide = torch.rand(4, 8), torch.rand(8, 8, dtype=torch.float64)
    note = note_on(lambda: F.linear(x, wide))
    assert note.endswith("torch.float64 is not cast; call .to(torch.float32) on wide")
    F.linear(x, wide.to(torch.float32))
    note = note_on(lambda: F.linear(x, torch.rand(8, 8).double()))
    assert note.endswith("torch.float64 is not cast; call .to(torch.float32) on the tensors of another dtype")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_fp64_is_told_to_be_converted(level: str, half: torch.dtype) -> None:
    def net(dtype: torch.dtype) -> nn.Module:
        return Net(Part(lambda x, layer: layer(x.to(dtype)), linear))

    note = note_on(lambda: train(net(torch.float64), level, half))
    target = torch.float32 if level == "O1" else half
    assert note.endswith(f"torch.float64 is not cast; call .to({target}) on input")
    assert ("linear is fp16 by " in note) is (level == "O1")
    train(net(target), level, half)


def test_a_rule_without_a_half_kernel_is_told_with_its_line(half: torch.dtype, tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\nextends = "default"\nfp16 = ["cholesky"]\n')
    x = torch.eye(8)
    start(half, lists=str(path))
    note = note_on(lambda: torch.linalg.cholesky(x))
    assert note == f'autoamp: x is torch.float32; cholesky is fp16 by {path}:3; add fp32 = ["cholesky"] to the list'
    path.write_text('schema = 1\nextends = "default"\nfp32 = ["cholesky"]\n')
    start(half, lists=str(path))
    torch.linalg.cholesky(x)


class Memory(nn.Module):
    """Multiplies its input with what another module has computed."""

    memory: Tensor

    def __init__(self, convert: torch.dtype | None = None) -> None:
        super().__init__()
        self.convert = convert

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory if self.convert is None else self.memory.to(self.convert)
        return x @ memory


@pytest.mark.parametrize("form", ["override", "path", "class"])
def test_a_half_tensor_from_outside_of_an_fp32_module(form: str, half: torch.dtype) -> None:
    class Outer(nn.Module):
        def __init__(self, *args: Any) -> None:
            super().__init__()
            self.layer, self.inner = nn.Linear(8, 8), Memory(*args)

        def forward(self, x: Tensor) -> Tensor:
            self.inner.memory = self.layer(x)
            return self.inner(x)  # type: ignore[no-any-return]

    def run(*args: Any) -> None:
        patterns = {"path": "inner", "class": f"{__name__}.Memory"}
        handle = start(half, lists={"modules": {patterns[form]: "fp32"}} if form in patterns else None)
        model = Outer(*args)
        if form == "override":
            handle.override(model.inner, "fp32")
        elif form == "path":
            handle.override(model)
        model(torch.rand(8, 8))

    note = note_on(run)
    by = "an override" if form == "override" else "lists="
    assert f"the precision of Memory is set by {by}" in note
    assert note.endswith("; call .to(torch.float32) on memory")
    run(torch.float32)


@pytest.mark.parametrize("region", ["disable_casts", "autocast", "autocast in a module"])
def test_where_casts_are_off_the_conversion_is_told(region: str, half: torch.dtype) -> None:
    handle = start(half)
    layer, x = nn.Linear(8, 8), torch.rand(8, 8) @ torch.rand(8, 8)

    def run(x: Tensor, *_: Any) -> Tensor:
        with handle.disable_casts() if region == "disable_casts" else torch.autocast("cpu", enabled=False):
            return layer(x)  # type: ignore[no-any-return]

    net = Net(Part(run)) if region == "autocast in a module" else run
    note = note_on(lambda: net(x))
    assert note.endswith("casts are off around this call; call .to(torch.float32) on input")
    run(x.float())


def test_weights_that_the_program_made_half(half: torch.dtype) -> None:
    def run(dtype: torch.dtype) -> None:
        def write(x: Tensor, layer: nn.Module) -> Tensor:
            out = torch.zeros(8, 8, dtype=dtype)
            out[torch.arange(8)] = layer.weight
            return x + out

        Net(Part(write, linear)).to(half)(torch.rand(8, 8))

    start(half)
    note = note_on(lambda: run(torch.float32))
    assert note.endswith(f"(part.parts.0.weight, made half by the program); call .to({half}) on out")
    run(half)


@pytest.mark.filterwarnings("ignore:parameter")
def test_unscaled_half_gradients(half: torch.dtype) -> None:
    if half is torch.bfloat16:
        pytest.skip("torch unscales bf16 gradients")
    layer = nn.Linear(8, 8).half()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    start(half)
    scaler.scale(layer(torch.rand(4, 8)).float().sum()).backward()
    for call in (scaler.unscale_, scaler.step):
        note = note_on(lambda call=call: call(optimizer))  # type: ignore[misc]
        assert f"param is {half}" in note
        assert note.endswith("scale the loss by autoamp.scale_loss(loss, optimizer), which takes half gradients")
    optimizer.zero_grad()
    step(layer, optimizer)
    assert layer.weight.grad is not None


# -- no note, or one --


def raised(text: str, kind: type[Exception] = RuntimeError) -> Forward:
    def forward(x: Tensor) -> Tensor:
        raise kind(text)

    return forward


OTHERS: dict[str, Forward] = {
    "shape": lambda x: x @ torch.ones(3, 3),
    "view": lambda x: x.view(7, -1),
    "attribute": lambda x: x.nosuch,
    "type": lambda x: torch.relu(x, x),  # type: ignore[call-arg]
    "argument": lambda x: torch.nn.functional.linear(x, None),  # type: ignore[arg-type]
    "index": lambda x: x[100],
    "index dtype": lambda x: torch.gather(x, 1, x),
    "integers": lambda x: torch.cholesky_inverse(torch.ones(2, 2, dtype=torch.long)),
    "embedding of floats": lambda x: F.embedding(x, torch.ones(4, 4)),
    "float targets": lambda x: F.nll_loss(x, torch.zeros(16)),
    "integer factor": lambda x: torch.mm(x, torch.ones(8, 8, dtype=torch.long)),
    "integer convolution": lambda x: F.conv1d(x[None], torch.ones(1, 16, 3, dtype=torch.long)),
    "quantile of integers": lambda x: torch.quantile(torch.ones(3, dtype=torch.long), 0.5),
    "key": lambda x: {}[torch.float16],
    "backward twice": lambda x: x.sum().backward() or x.sum().backward(),
    "in place": lambda x: torch.ones(3, requires_grad=True).add_(1),
    "numpy": lambda x: x.numpy(),
    "memory": raised("CUDA out of memory. Tried to allocate 2.00 GiB", torch.OutOfMemoryError),
    "device": raised("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    "stop": raised("", StopIteration),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_errors_get_no_note(name: str, level: str, half: torch.dtype) -> None:
    def run(level: str) -> BaseException:
        with pytest.raises(Exception) as caught:  # noqa: PT011 -- of any kind
            train(Net(Part(OTHERS[name])), level, half)
        return caught.value

    error = run(level)
    assert not getattr(error, "__notes__", ())
    assert type(error) is type(run("O0"))


def test_an_error_gets_one_note_on_its_way(half: torch.dtype) -> None:
    def forward(x: Tensor, part: nn.Module) -> Tensor:
        try:
            return part(x)  # type: ignore[no-any-return]
        except RuntimeError as error:
            error.add_note("a note of the program")
            raise

    net = Net(Part(forward, lambda: Part(lambda x, layer: layer(x.double()), linear)))
    with pytest.raises(RuntimeError) as caught:
        train(net, "O2", half, {"modules": {"part": "fp32", "part.parts.0": "fp16"}})
    ours, theirs = caught.value.__notes__
    assert ours.startswith("autoamp: ")
    assert theirs == "a note of the program"


def test_an_error_that_the_program_handles_stays_handled(half: torch.dtype) -> None:
    def forward(x: Tensor) -> Tensor:
        try:
            return torch.linalg.qr(x)[0]
        except RuntimeError:
            return torch.linalg.qr(x.float())[0].to(x.dtype)

    train(Net(Part(forward)), "O2", half)


def test_code_without_source_has_a_note(half: torch.dtype) -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec("def forward(x):\n    return torch.linalg.qr(x)[0]\n", scope)
    note = note_on(lambda: train(Net(Part(scope["forward"])), "O2", half, {"none": ["qr"]}))
    assert note.startswith(f"autoamp: x is {half}; keep part in fp32")


def test_a_line_of_several_statements_is_not_told_and_none_of_the_library(half: torch.dtype, tmp_path: Any) -> None:
    file = tmp_path / "shared_line.py"
    file.write_text(
        "import autoamp, torch\n"
        "def on_one_line(weight):\n"
        "    with autoamp.disable_casts():\n"
        "        wide = None\n"
        "        wide = torch.rand(4, 4); torch.mm(wide, weight)\n"
        "def inner(wide, weight):\n"
        "    with autoamp.disable_casts():\n"
        "        return torch.mm(wide, weight)\n"
        "def through(weight):\n"
        "    made = torch.rand(4, 4)\n"
        "    return inner(made, weight)\n"
    )
    scope = runpy.run_path(str(file))
    handle = autoamp.init(device_type="cpu", dtype=half)
    weight = torch.rand(4, 4).to(half)
    assert "(the variable wide of on_one_line)" in note_on(lambda: scope["on_one_line"](weight))
    assert f"(made at {file}:10 by `made = torch.rand(4, 4)`)" in note_on(lambda: scope["through"](weight))
    handle.deactivate()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_code_is_one_graph_and_its_errors_point_at_eager(level: str, half: torch.dtype) -> None:
    net = Net(Part(torch.sin))
    train(net, level, half)
    x = torch.rand(16, 8)
    net.zero_grad()
    compiled: Any = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), net(x))
    torch._dynamo.reset()
    net.part.function = lambda x: F.linear(x, torch.ones(8, 8, dtype=torch.float64))
    assert "without torch.compile" in note_on(lambda: torch.compile(net, backend="eager", fullgraph=True)(x))
