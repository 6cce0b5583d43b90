"""Models in half precision: what is cast and what is not, copies and pickles of them, and their state dicts."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import autoamp
from autoamp.core import runtime_of
from tests.core.modules.watches import Calls

LISTS = {"extends": [], "fp16": ["linear"], "fp32": ["softmax"]}


def initialize(model: Any, optimizers: Any = None, **kwargs: Any) -> Any:
    defaults = {"opt_level": "O2", "dtype": torch.float16, "device_type": "cpu", "verbosity": 0, "lists": LISTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autoamp.initialize(model, optimizers, **{**defaults, **kwargs})


def with_sgd(model: nn.Module, **kwargs: Any) -> tuple[Any, Any]:
    return initialize(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), **kwargs)  # type: ignore[no-any-return]


def train(optimizer: Any, loss: Callable[[], Tensor], count: int = 3) -> None:
    """Take steps, which lower the loss."""
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(loss())
        with autoamp.scale_loss(losses[-1], optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert count == 1 or losses[-1] < losses[0]


class Mixed(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.layer_norm = nn.LayerNorm(3)
        self.wide_one = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("table", torch.linspace(0, 1, 7))
        self.register_buffer("wide", torch.ones(2, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("hidden", torch.full((2,), 0.1), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(self.norm(self.linear(x))) * self.table[:3]


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


# -- parameters and buffers --


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_level_casts_weights_and_buffers_but_not_float64_and_integers(level: str) -> None:
    model = initialize(Mixed(), opt_level=level)
    tensors = (*model.named_parameters(), *model.named_buffers())
    low = {"linear.weight", "linear.bias", "layer_norm.weight", "layer_norm.bias", "table", "hidden"}
    if level == "O3":
        low |= {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    assert {name for name, tensor in tensors if tensor.dtype is torch.float16} == low
    assert {name for name, tensor in tensors if tensor.dtype is torch.float64} == {"wide_one", "wide"}
    assert model.count.dtype is torch.int64


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_buffers_come_back_as_they_were(level: str) -> None:
    model = Mixed()
    before = {name: b.clone() for name, b in model.named_buffers()}
    initialize(model, opt_level=level)
    assert torch.equal(model.state_dict()["table"], before["table"])
    model.train()(torch.randn(8, 3))
    moved = model.norm.running_mean.float().clone()
    initialize(model, opt_level="O0")
    assert torch.equal(model.table, before["table"])
    assert torch.equal(model.hidden, before["hidden"])
    assert torch.equal(model.norm.running_mean, moved)
    assert moved.any()


def test_a_buffer_that_was_written_to_is_not_taken_back() -> None:
    model = initialize(Mixed())
    model.table.mul_(2)
    written = model.table.float()
    assert torch.equal(model.state_dict()["table"], written)
    initialize(model, opt_level="O0")
    assert torch.equal(model.table, written)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d])
def test_norms_are_kept_in_fp32_and_train(norm: Any, half: torch.dtype) -> None:
    layer = norm(3, affine=True, track_running_stats=True) if norm is nn.InstanceNorm2d else norm(3)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), layer, nn.Conv2d(3, 2, 3))
    model, optimizer = with_sgd(model, dtype=half)
    assert {t.dtype for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()} == {torch.float32}
    # SyncBatchNorm runs on accelerators alone.
    if norm is not nn.SyncBatchNorm:
        train(optimizer, lambda: model(torch.ones(2, 1, 8, 8)).pow(2).mean())
        assert layer.running_mean.any()


def test_what_is_shared_stays_shared(half: torch.dtype) -> None:
    class Tied(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.out = nn.Linear(4, 10, bias=False)
            self.out.weight = self.embedding.weight
            self.register_buffer("same", self.table)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embedding(x))

    model, optimizer = with_sgd(Tied(), dtype=half)
    assert model.out.weight is model.embedding.weight
    assert model.same is model.table
    assert model.table.dtype is half
    assert len(list(autoamp.master_params(optimizer))) == len(list(model.parameters()))
    tokens = torch.tensor([1, 2, 3])
    train(optimizer, lambda: nn.functional.cross_entropy(model(tokens), tokens), 20)
    state = model.state_dict()
    assert torch.equal(state["out.weight"], state["embedding.weight"])
    assert state["out.weight"].dtype is torch.float32
    initialize(model, opt_level="O0")
    assert model.out.weight is model.embedding.weight
    assert model.same is model.table


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
    ids=["weight_norm hook", "spectral_norm hook", "weight_norm", "spectral_norm"],
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_reparametrized_layers_train_and_their_state_loads_into_a_plain_model(wrap: Any, level: str) -> None:
    def network() -> nn.Module:
        return nn.Sequential(wrap(nn.Linear(4, 6)), nn.Tanh(), wrap(nn.Linear(6, 2)))

    model, optimizer = with_sgd(network(), opt_level=level)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)
    train(optimizer, lambda: nn.functional.mse_loss(model(inputs), targets), 20)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert {v.dtype for v in state.values()} == {torch.float32}
    plain = network()
    plain.load_state_dict(state, strict=True)
    expected = model.eval()(inputs)
    torch.testing.assert_close(plain.eval()(inputs), expected, atol=0.03, rtol=0.03)
    initialize(model, opt_level="O0")
    torch.testing.assert_close(model(inputs), plain(inputs), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_train_in_half_and_take_packed_sequences(kind: Any, level: str, half: torch.dtype) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True)
            self.out = nn.Linear(10, 3)

        def forward(self, x: Any) -> Tensor:
            hidden, _ = self.rnn(x)
            if isinstance(hidden, PackedSequence):
                hidden, _ = pad_packed_sequence(hidden, batch_first=True)
            return self.out(hidden)

    model, inputs = Tagger(), torch.randn(3, 6, 4)
    expected = model(inputs)
    model, optimizer = with_sgd(model, opt_level=level, dtype=half)
    torch.testing.assert_close(model(inputs), expected, atol=0.03, rtol=0.03)
    train(optimizer, lambda: model(inputs).pow(2).mean())
    packed = pack_padded_sequence(inputs, torch.tensor([6, 4, 2]), batch_first=True)
    assert model(packed).dtype is torch.float32
    assert packed.data.dtype is torch.float32


# -- copies --


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model, optimizer = with_sgd(two_layers())
    twin, inputs = copy.deepcopy(model), torch.randn(4, 3)
    before = twin(inputs)
    assert before.dtype is torch.float32
    assert torch.equal(before, model(inputs))
    train(optimizer, lambda: model(inputs).pow(2).sum())
    assert torch.equal(twin(inputs), before)
    assert not torch.equal(model(inputs), before)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.any()
    assert {v.dtype for v in twin.state_dict().values()} == {torch.float32}
    twin.load_state_dict(model.state_dict())
    assert twin[0].weight.dtype is torch.float16


def test_a_copy_outlives_its_model_when_torch_is_patched_anew() -> None:
    model = initialize(two_layers())
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    autoamp.current_handle().count()  # type: ignore[union-attr]
    assert {value.dtype for value in twin.state_dict().values()} == {torch.float32}


def test_a_half_model_is_pickled_and_loaded_as_a_plain_one() -> None:
    model, optimizer = with_sgd(two_layers())
    inputs, file = torch.ones(2, 3), io.BytesIO()
    train(optimizer, lambda: model(inputs).pow(2).sum(), 1)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(inputs), model(inputs))
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    # Without the handle it is a plain half model.
    assert loaded(inputs.half()).dtype is torch.float16
    file.seek(0)
    assert torch.load(file, weights_only=False)[0].weight.dtype is torch.float16
    assert vars(model).keys() == vars(two_layers()).keys()


# -- inputs and outputs --


class Point(NamedTuple):
    x: Tensor
    label: Any


@dataclasses.dataclass
class Batch:
    data: Tensor
    name: str
    parts: list[Tensor]


@dataclasses.dataclass(frozen=True)
class Frozen:
    data: Tensor
    more: dict[str, Tensor]


class Custom:
    def __init__(self, data: Tensor) -> None:
        self.data = data

    def to(self, dtype: torch.dtype) -> Custom:
        return Custom(self.data.to(dtype))


class Graph:
    """As a batch of PyG: ``to`` passes on what it gets to all that it holds, and is made for devices."""

    def __init__(self, x: Tensor, edges: Tensor, mask: Tensor, phase: Tensor) -> None:
        self.held = {"x": x, "edges": edges, "mask": mask, "phase": phase}

    def to(self, *args: Any, **kwargs: Any) -> Graph:
        return Graph(**{key: value.to(*args, **kwargs) for key, value in self.held.items()})


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's ModelOutput: a dataclass and a dict at once, that refuses ``update``."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("refused")

    def __setitem__(self, key: str, value: Any) -> None:
        OrderedDict.__setitem__(self, key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def floats(value: Any) -> Any:
    """The dtypes within a value, by its shape."""
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, dict):
        return {key: floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [floats(item) for item in value]
    if isinstance(value, (Batch, Frozen, Custom)):
        return floats(vars(value))
    return type(value)


HALF = torch.float16
ONE = torch.ones(2)
STRUCTURES: dict[str, tuple[Callable[[], Any], Any]] = {
    "tensor": (lambda: ONE, HALF),
    "integers": (lambda: torch.ones(2, dtype=torch.int64), torch.int64),
    "complex": (lambda: ONE.cfloat(), torch.complex64),
    "sparse": (lambda: ONE.to_sparse(), torch.float32),
    "nested": (lambda: [ONE, (ONE, {"a": ONE, "b": 3})], [HALF, [HALF, {"a": HALF, "b": int}]]),
    "namedtuple": (lambda: Point(ONE, None), [HALF, type(None)]),
    "dataclass": (lambda: Batch(ONE, "n", [ONE]), {"data": HALF, "name": str, "parts": [HALF]}),
    "frozen": (lambda: Frozen(ONE, {"k": ONE}), {"data": HALF, "more": {"k": HALF}}),
    "custom": (lambda: Custom(ONE), {"data": HALF}),
    "defaultdict": (lambda: defaultdict(list, a=ONE), {"a": HALF}),
    "model output": (lambda: Output(ONE, [ONE]), {"logits": HALF, "hidden": [HALF]}),
    "other": (lambda: "text", str),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_structures_into_and_out_of_a_model(case: str) -> None:
    seen: list[Any] = []

    def identity(given: Any, key: Any) -> Any:
        seen.extend([given, key])
        return given

    make, expected = STRUCTURES[case]
    model, value = initialize(Calls(identity)), make()
    before = floats(value)
    got = model(value, key=make())
    assert [floats(item) for item in seen] == [expected, expected]
    assert floats(got) == floats(value) == before
    assert type(seen[0]) is type(got) is type(value)
    if before == expected:
        assert got is seen[0] is value


def test_objects_keep_their_integers(half: torch.dtype) -> None:
    edges, mask, phase = torch.tensor([1001, 100003]), torch.tensor([True]), torch.ones(1, dtype=torch.complex64)
    seen: list[dict[str, Tensor]] = []

    def first(graphs: list[Graph]) -> Graph:
        seen.append(graphs[0].held)
        return graphs[0]

    seen.append(initialize(Calls(first), dtype=half)([Graph(ONE, edges, mask, phase)]).held)
    for got, dtype in zip(seen, (half, torch.float32), strict=True):
        assert got["x"].dtype is dtype
        assert got["edges"] is edges
        assert got["mask"] is mask
        assert got["phase"] is phase
    assert edges.to(half).dtype is half


def test_built_containers_are_whole() -> None:
    pair = namedtuple("pair", "a b")

    def parts(output: Output, items: Any, old: Any) -> tuple[Any, ...]:
        assert output.logits is output["logits"]
        return items["new"], old.a.dtype, old.b

    assert initialize(Calls(parts))(Output(ONE, None), defaultdict(list, a=ONE), pair(ONE, 1)) == ([], HALF, 1)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floating_inputs_of_any_dtype_are_cast(level: str, given: torch.dtype, half: torch.dtype) -> None:
    model = initialize(nn.Linear(2, 2), opt_level=level, dtype=half)
    seen = []
    model.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    assert model(torch.ones(1, 2, dtype=given)).dtype is torch.float32
    wanted = torch.float32 if level == "O0" else half
    assert seen == [(wanted, wanted)]


def test_a_model_with_fp64_parameters_gets_its_fp64_inputs_as_they_are() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.low = nn.Linear(2, 2).double(), nn.Linear(2, 2)

        def forward(self, wide: Tensor, low: Tensor) -> tuple[torch.dtype, ...]:
            return self.wide(wide).dtype, self.low(low).dtype

    model = initialize(Model())
    assert model(torch.ones(1, 2).double(), torch.ones(1, 2)) == (torch.float64, torch.float16)


# -- state dicts --


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(**kwargs: Any) -> tuple[Any, Any]:
    model, optimizer = with_sgd(fresh(), **kwargs)
    inputs = torch.randn(6, 3)
    train(optimizer, lambda: model(inputs).pow(2).mean())
    return model, optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_state_dict_is_fp32_and_loads_into_an_unpatched_model(level: str, half: torch.dtype) -> None:
    model, optimizer = trained(opt_level=level, dtype=half)
    state = copy.deepcopy(model.state_dict())
    assert {v.dtype for v in state.values()} == {torch.float32, torch.int64}
    assert list(state) == list(fresh().state_dict())
    assert state._metadata == fresh().state_dict()._metadata
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    plain = fresh()
    assert not plain.load_state_dict(state, strict=True).missing_keys
    for p, q in zip(plain.parameters(), optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


def test_state_dict_is_from_the_masters() -> None:
    model, optimizer = trained()
    master = next(iter(autoamp.master_params(optimizer)))
    weight = model.state_dict()["0.weight"]
    assert torch.equal(weight, master)
    assert not torch.equal(weight, model[0].weight.float())
    assert weight.data_ptr() == master.data_ptr()
    assert not weight.requires_grad
    assert torch.equal(model[0].state_dict()["weight"], master)
    assert torch.equal(Wrapper(model).state_dict()["module.0.weight"], master)
    assert nn.Linear(2, 2).half().state_dict()["weight"].dtype is torch.float16
    destination: Any = OrderedDict(mine=torch.ones(1).half())
    state = model.state_dict(destination=destination, prefix="p.")
    assert state is destination
    assert state["mine"].dtype is torch.float16
    assert torch.equal(state["p.0.weight"], master)
    assert model.state_dict(keep_vars=True)["0.weight"] is master
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(model.state_dict(OrderedDict(), "q.", False)["q.0.weight"], master)


def test_a_state_dict_error_leaves_the_next_one_right() -> None:
    model, _ = trained()
    handle = model.register_state_dict_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    handle.remove()
    assert model.state_dict()["0.weight"].dtype is torch.float32


def test_load_state_dict_of_wrappers_is_exact() -> None:
    model, optimizer = trained()
    other = fresh()
    Wrapper(model).load_state_dict({f"module.{k}": v for k, v in other.state_dict().items()}, strict=True)
    for master, q in zip(autoamp.master_params(optimizer), other.parameters(), strict=True):
        assert torch.equal(master, q)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({}, strict=True)


def test_buffers_load_unrounded() -> None:
    model, source = initialize(Mixed()), Mixed()
    source.table.mul_(1.0001)
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.state_dict()["table"], source.table)
    source.table.zero_()
    model.load_state_dict({"table": source.table}, strict=False)
    assert torch.equal(model.state_dict()["table"], source.table)
    initialize(model, opt_level="O0")
    assert torch.equal(model.table, source.table)


def test_nothing_is_kept_of_models_that_are_gone() -> None:
    for _ in range(2):
        initialize(two_layers(), opt_level="O3")
    model = initialize(two_layers(), opt_level="O3")
    twin, inputs = copy.deepcopy(model), torch.ones(2, 3)
    del model
    gc.collect()
    models = runtime_of(autoamp.current_handle()).models
    assert len(models.boundaries.values) == 1
    assert twin(inputs).dtype is torch.float32
    del twin
    gc.collect()
    assert not models.boundaries.values
