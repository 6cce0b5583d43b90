"""On any mesh of ranks a step is skipped on all of them or on none, and a rank without gradients hangs nobody.

On four spawned processes over gloo, whose collectives give up after a minute.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import autoamp
from autoamp.fp16_utils import FP16_Optimizer
from tests.integration.spawned import counted, on_ranks

pytestmark = pytest.mark.processes

RANKS = 4
INF = float("inf")
NO_CASTS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "lists": {"extends": []}}
KINDS = ("replicated", "sharded", "plain")
LAYOUTS = ("1-D", "2-D", "two meshes")
WAYS = ("scale_loss", "auto_scale", "O1", "O2", "FP16_Optimizer")
# Each layout in each way; which kind of gradient comes first takes turns.
CASES = [
    (layout, KINDS[(row + turn) % 3], way)
    for (row, layout), (turn, way) in itertools.product(enumerate(LAYOUTS), enumerate(WAYS))
]
# In these steps rank 1 has no gradient: an expert without tokens, a frozen stage. The second step overflows on rank 0.
IDLE, BUSY, STEPS, BAD_STEP = 1, 0, 4, 1
WHEN = {"never": (), "first": (0,), "as rank 0 overflows": (1,), "always": (0, 1, 2, 3)}
# A parameter on a mesh, one of each rank in a group that was asked for in either way, and such a one beside another one
# that the program reduces by hand.
IDLE_KINDS = ("mesh", "stage", "process_group", "experts")
IDLE_CASES = [
    (way, kind, when, clips)
    for (turn, way), kind, (place, when) in itertools.product(
        enumerate(("scale_loss", "auto_scale", "O2")), IDLE_KINDS, enumerate(WHEN)
    )
    for clips in (False, True)
    if clips == ((turn + place) % 2 == 0) and (way == "scale_loss" or kind != "process_group")
]


class Layouts:
    """The meshes of this process, made once."""

    def __init__(self) -> None:
        self.line = init_device_mesh("cpu", (RANKS,))
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def parameter(self, layout: str, kind: str, dtype: torch.dtype) -> nn.Parameter:
        whole = torch.arange(8.0).add(1.0).to(dtype)
        if kind == "plain":
            return nn.Parameter(whole)
        place, mesh = Replicate() if kind == "replicated" else Shard(0), self.line
        places: list[Any] = [place]
        if layout == "2-D":
            mesh, places = self.square, [Replicate(), place] if kind == "replicated" else [place, Shard(0)]
        elif layout == "two meshes":
            mesh = self.square["data" if kind == "replicated" else "tensor"]
        return nn.Parameter(DTensor.from_local(whole[:2].clone(), mesh, places, run_check=False))


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def loss_of(params: list[nn.Parameter], factors: list[float]) -> Tensor:
    parts = [(local(param).float() * factor).sum() for param, factor in zip(params, factors, strict=True)]
    return torch.stack(parts).sum()


class Training:
    """A program that trains parameters in one of `WAYS`."""

    def __init__(self, way: str, params: list[nn.Parameter], group: Any = None) -> None:
        self.way, self.params = way, params
        self.optimizer: Any = torch.optim.SGD(params, lr=0.5, foreach=False)
        if way in ("O1", "O2") or group is not None:
            options = NO_CASTS if way != "O2" else {**NO_CASTS, "lists": None}
            options = {**options, "opt_level": "O2" if way == "O2" else "O1", "loss_scale": "dynamic", "verbosity": 0}
            autoamp.initialize(nn.ParameterList(params), self.optimizer, process_group=group, **options)
            self.handle: Any = autoamp.current_handle()
        else:
            self.handle = autoamp.init(**NO_CASTS)
        if way == "FP16_Optimizer":
            self.optimizer = FP16_Optimizer(self.optimizer, dynamic_loss_scale=True)
        if way == "auto_scale":
            self.handle.auto_scale()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.deactivate()

    @property
    def scale(self) -> float:
        return float((self.optimizer if self.way == "FP16_Optimizer" else self.handle).loss_scale)

    def stepped(self) -> list[Tensor]:
        """Return copies of what the optimizer steps, this rank's part."""
        return [local(param).detach().clone() for group in self.optimizer.param_groups for param in group["params"]]

    def backward(self, factors: list[float], idle: bool = False) -> None:
        """Run a backward pass of a loss that takes each parameter times its factor; the first is left out if idle."""
        used = self.params[idle:]
        loss = loss_of(used, factors[idle:]) if used else torch.zeros(())
        if self.way == "FP16_Optimizer":
            self.optimizer.backward(loss)
        elif self.way != "auto_scale":
            with autoamp.scale_loss(loss, self.optimizer) as scaled:
                if used:
                    scaled.backward()
        elif used:
            loss.backward()

    def step(self, factors: list[float]) -> None:
        self.optimizer.zero_grad()
        self.backward(factors)
        self.optimizer.step()


def one_case(layouts: Layouts, layout: str, first: str, way: str) -> list[Any]:
    """For inf on each rank, in each kind of gradient: the step that is skipped, the next one, the scale, the cost."""
    kinds = [first, *(kind for kind in KINDS if kind != first)]
    dtype = torch.float16 if way == "FP16_Optimizer" else torch.float32
    params = [layouts.parameter(layout, kind, dtype) for kind in kinds]
    told = []
    with Training(way, params) as training:
        factors = [0.25] * len(kinds)
        training.step(factors)
        for bad, place in itertools.product((0, RANKS - 1), range(len(kinds))):
            before, scale_before = [local(param).detach().clone() for param in params], training.scale
            spoilt = [INF if index == place and dist.get_rank() == bad else one for index, one in enumerate(factors)]
            with counted() as calls, CommDebugMode() if not told else contextlib.nullcontext() as comms:
                training.step(spoilt)
            same = all(torch.equal(local(param), old) for param, old in zip(params, before, strict=True))
            training.step(factors)
            moved = [
                float((old - local(param).detach()).float().mean()) for param, old in zip(params, before, strict=True)
            ]
            collectives = max(calls(), comms.get_total_counts() if comms else 0)
            told.append((same, scale_before, training.scale, collectives, moved))
    return told


def idle_case(layouts: Layouts, way: str, kind: str, when: str, clips: bool) -> list[Any]:
    """For each step whether parameters stayed, the scale, the collectives of the step, and the norm."""
    own = layouts.parameter("1-D", "sharded" if kind == "mesh" else "plain", torch.float32)
    params = [own, layouts.parameter("1-D", "plain", torch.float32)] if kind == "experts" else [own]
    told: list[Any] = []
    with Training(way, params, dist.group.WORLD if kind == "process_group" else None) as training:
        if kind in ("stage", "experts"):
            training.handle.sync_over(dist.group.WORLD, replicas=1)
        for number in range(STEPS):
            idle = dist.get_rank() == IDLE and number in WHEN[when]
            before = training.stepped()
            training.optimizer.zero_grad()
            bad = number == BAD_STEP and dist.get_rank() == BUSY
            factors = [INF if bad else 0.5, 0.5][: len(params)]
            training.backward(factors, idle)
            if kind == "experts":
                dist.all_reduce(params[1].grad)
            with counted() as calls:
                norm = float(training.handle.clip_grad_norm_(training.optimizer, 1e9)) if clips else None
                training.optimizer.step()
            stayed = torch.equal(before[0], training.stepped()[0])
            told.append((stayed, training.scale, calls(), norm))
        told.append(training.handle.state_dict())
    return told


# -- other things, each a program of its own --


def clipped(layouts: Layouts) -> dict[str, Any]:
    """The norm of whole gradients, clipped, and how many collectives both took."""
    params = [layouts.parameter("2-D", kind, torch.float32) for kind in KINDS]
    found: dict[str, Any] = {}
    for norm_type in (2.0, 3.0, INF):
        with Training("scale_loss", params) as training:
            training.backward([1.0, 2.0, 3.0])
            with CommDebugMode() as comms:
                norm = training.handle.clip_grad_norm_(training.optimizer, 1.0, norm_type)
                training.optimizer.step()
            gradients = [local(param.grad) for param in params]
            found[str(norm_type)] = (float(norm), comms.get_total_counts(), [float(g.max()) for g in gradients])
            training.optimizer.zero_grad()
    return found


def partial(layouts: Layouts, dtype: torch.dtype) -> list[Any]:
    """Gradients of which each rank has an addend: large ones whose sum has no room in fp16."""
    told = []
    for value in (1.0, 30000.0):
        param = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.zeros(4, dtype=dtype), layouts.line))
        optimizer = torch.optim.SGD([param], lr=1.0, foreach=False)
        handle = autoamp.init(**NO_CASTS, loss_scale=1.5)
        with handle.scale_loss(torch.ones(()), optimizer):
            scaled = torch.full((4,), value, dtype=dtype) * 1.5
            param.grad = DTensor.from_local(scaled, layouts.line, [Partial()], run_check=False)
        optimizer.step()
        told.append((handle.skipped_steps, float(local(param).detach()[0])))
        handle.deactivate()
    return told


def several_losses(layouts: Layouts) -> list[Any]:
    """Losses with scalers of their own: that of the loss which overflowed goes lower, on all ranks."""
    params = [layouts.parameter("1-D", kind, torch.float32) for kind in KINDS]
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
    options: dict[str, Any] = {**NO_CASTS, "verbosity": 0, "loss_scale": "dynamic", "num_losses": 2}
    autoamp.initialize(nn.ParameterList(params), optimizer, **options)
    told = []
    for bad in (None, 0, 1):
        optimizer.zero_grad()
        for loss_id in (0, 1):
            factor = INF if bad == loss_id and dist.get_rank() == 3 else 1.0
            with autoamp.scale_loss(loss_of(params, [factor, 1.0, 1.0]), optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
        optimizer.step()
        told.append([autoamp.state_dict()[f"loss_scaler{loss_id}"]["loss_scale"] for loss_id in (0, 1)])
    autoamp.current_handle().deactivate()  # type: ignore[union-attr]
    return told


def idle_in_the_first_block(layouts: Layouts) -> list[float]:
    """A rank that has no gradients in the first of two blocks of a step, as an expert without tokens."""
    params = [layouts.parameter("1-D", "sharded", torch.float32)]
    with Training("scale_loss", params) as training:
        before = training.stepped()[0]
        for block in range(2):
            training.backward([1.0], idle=block == 0 and dist.get_rank() == 3)
        training.optimizer.step()
        return (before - training.stepped()[0]).tolist()


def dropped(layouts: Layouts, kind: str) -> list[Any]:
    """Programs that look at the norm, and drop the gradients without a step where it is not finite."""
    params = [layouts.parameter("1-D", "plain" if kind == "asked" else kind, torch.float32)]
    told = []
    with Training("scale_loss", params) as training:
        if kind == "asked":
            training.handle.sync_over(dist.group.WORLD, replicas=1)
        for number in range(5):
            bad = number == 1
            training.optimizer.zero_grad()
            before = training.stepped()[0]
            # In a group that was asked for a rank may have nothing to drop.
            if not (bad and kind == "asked" and dist.get_rank() == 1):
                training.backward([INF if bad and dist.get_rank() == 3 else 1.0])
            norm = float(training.handle.clip_grad_norm_(training.optimizer, 1e9))
            if norm < INF:
                training.optimizer.step()
            moved = not torch.equal(before, training.stepped()[0])
            told.append((norm < INF, moved, training.handle.skipped_steps, training.scale))
    return told


def sharded_adam(layouts: Layouts) -> list[Any]:
    """A fused optimizer that takes the flag of an overflow, given flags of all ranks."""
    with Training("scale_loss", [layouts.parameter("1-D", "sharded", torch.float32)]) as training:
        training.optimizer = torch.optim.Adam(training.params, lr=0.5, fused=True)
        told = []
        for factor in (1.0, INF if dist.get_rank() == 0 else 1.0, 1.0):
            training.step([factor])
            told.append((local(training.params[0]).tolist(), training.scale))
    return told


def refusal(layouts: Layouts) -> str:
    with Training("scale_loss", [layouts.parameter("two meshes", "sharded", torch.float32)]) as training:
        training.handle.sync_over(layouts.square["data"].get_group())
        with pytest.raises(autoamp.UsageError) as caught:
            training.step([1.0])
    return str(caught.value)


class TwoLayers(nn.Module):
    """Ranks use one layer, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return (y if dist.get_rank() == IDLE else self.second(y)).float().sum()


def wrapped(way: str, wrap: Callable[[nn.Module], Any], model: nn.Module) -> list[Any]:
    """For each step the norm, the scale, and the parameters."""
    # Gradients of the first step have room in fp16.
    scaler = autoamp.DynamicLossScaler(2.0**10)
    options: dict[str, Any] = {"dtype": torch.float16, "device_type": "cpu", "loss_scale": scaler}
    if way == "O2":
        autoamp.initialize(model, opt_level="O2", verbosity=0, **options)
    else:
        autoamp.init(**options)
    handle: Any = autoamp.current_handle()
    if way == "auto_scale":
        handle.auto_scale()
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    told: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().sum() * (INF if step == BAD_STEP and dist.get_rank() == BUSY else 1.0)
        with contextlib.nullcontext(loss) if way == "auto_scale" else handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        norm = float(handle.clip_grad_norm_(optimizer, 1e9))
        optimizer.step()
        told.append((norm, handle.loss_scale, [local(param).detach().clone() for param in model.parameters()]))
    handle.deactivate()
    return told


def found_by_rank() -> dict[Any, Any]:
    layouts = Layouts()
    found: dict[Any, Any] = {}
    for layout, first, way in CASES:
        found[layout, first, way] = one_case(layouts, layout, first, way)
    for case in IDLE_CASES:
        found[case] = idle_case(layouts, *case)
    for way in ("scale_loss", "auto_scale", "O2"):
        ddp = lambda model: DistributedDataParallel(model, find_unused_parameters=True)  # noqa: E731
        found["unused", way] = wrapped(way, ddp, TwoLayers())
        # The weight and the bias have one row: three of the ranks have nothing of either.
        found["empty", way] = wrapped(way, fully_shard, nn.Linear(4, 1))
    found["clipped"] = clipped(layouts)
    found["partial"] = {str(dtype): partial(layouts, dtype) for dtype in (torch.float16, torch.float32)}
    found["losses"] = several_losses(layouts)
    found["dropped"] = {kind: dropped(layouts, kind) for kind in ("sharded", "asked")}
    found["idle"] = idle_in_the_first_block(layouts)
    found["adam"] = sharded_adam(layouts)
    found["refusal"] = refusal(layouts)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of four processes found."""
    return on_ranks(tmp_path_factory, RANKS, found_by_rank, timeout=60.0)


@pytest.mark.parametrize(("layout", "first", "way"), CASES)
def test_a_step_is_skipped_on_all_ranks_or_on_none(ranks: list[Any], layout: str, first: str, way: str) -> None:
    for told in zip(*(found[layout, first, way] for found in ranks), strict=True):
        for same, before, after, collectives, moved in told:
            assert same, "the parameters of a rank moved in a step that overflowed"
            assert before > 1.0
            assert after == before / 2
            assert collectives == 1
            # The step after it: lr 0.5 times the factor.
            assert moved == pytest.approx([0.125] * len(KINDS), rel=1e-2)


def test_clipping_goes_by_whole_gradients_and_costs_one_collective_beside_that_of_the_step(ranks: list[Any]) -> None:
    whole = torch.cat([torch.full((2,), 1.0), torch.full((8,), 2.0), torch.full((8,), 3.0)])
    for found in ranks:
        for norm_type, (norm, collectives, left) in found["clipped"].items():
            expected = float(torch.linalg.vector_norm(whole, float(norm_type)))
            assert norm == pytest.approx(expected, rel=1e-6)
            assert left == pytest.approx([factor / expected for factor in (1.0, 2.0, 3.0)], rel=1e-5)
            assert collectives == 2


def test_gradients_that_are_added_up_are_looked_at_as_sums(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["partial"]["torch.float16"] == [(0, -4.0), (1, 0.0)]
        assert found["partial"]["torch.float32"] == [(0, -4.0), (0, -120000.0)]


@pytest.mark.parametrize(("way", "kind", "when", "clips"), IDLE_CASES)
def test_a_rank_without_gradients_agrees_with_the_others(
    ranks: list[Any], way: str, kind: str, when: str, clips: bool
) -> None:
    for index, found in enumerate(ranks):
        *steps, state = found[way, kind, when, clips]
        assert state == ranks[0][way, kind, when, clips][-1]
        assert state["skipped_steps"] == 1
        assert [scale for _, scale, *_ in steps] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
        # A rank that knows nothing of an overflow yet has to ask in each step. It asks once more if gradients were
        # clipped: any rank may have written to them since.
        assert [collectives for *_, collectives, _ in steps] == [1 + clips] * STEPS
        idle = WHEN[when] if index == IDLE else ()
        assert [stayed for stayed, *_ in steps] == [step == BAD_STEP or step in idle for step in range(STEPS)]
        if clips and kind == "stage" and when == "never":
            # Each rank's part counts once.
            assert steps[0][3] == pytest.approx(0.5 * (RANKS * 8) ** 0.5)


def test_each_loss_has_its_own_scale_on_all_ranks(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["losses"] == [[2.0**16, 2.0**16], [2.0**15, 2.0**16], [2.0**15, 2.0**15]]


def test_a_rank_may_be_idle_in_the_first_of_several_blocks(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        assert found["idle"] == [0.5 if rank == 3 else 1.0] * 2


@pytest.mark.parametrize("kind", ["sharded", "asked"])
def test_gradients_dropped_for_their_norm_lower_the_scale_of_all_ranks(ranks: list[Any], kind: str) -> None:
    for found in ranks:
        told = found["dropped"][kind]
        assert [finite for finite, *_ in told] == [True, False, True, True, True]
        # A rank may have had nothing to drop: it is the next step that tells all of them, and is skipped.
        assert [moved for _, moved, *_ in told] == [True, False, False, True, True]
        assert [skipped for *_, skipped, _ in told] == [0, 0, 1, 1, 1]
        assert [scale for *_, scale in told] == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15]


@pytest.mark.parametrize("way", ["scale_loss", "auto_scale", "O2"])
@pytest.mark.parametrize("name", ["unused", "empty"])
def test_a_rank_without_some_of_the_parameters(ranks: list[Any], name: str, way: str) -> None:
    for found in ranks:
        norms, scales, values = zip(*found[name, way], strict=True)
        assert list(scales) == [2.0**10, 2.0**9, 2.0**9, 2.0**9]
        assert [math.isfinite(norm) for norm in norms] == [step != BAD_STEP for step in range(STEPS)]
        assert list(norms) == pytest.approx([norm for norm, *_ in ranks[0][name, way]], nan_ok=True)
        assert all(map(torch.equal, values[0], values[1]))
        if name == "unused":
            assert not any(map(torch.equal, values[1], values[2]))
            assert all(map(torch.equal, values[2], ranks[0][name, way][2][2]))
        else:
            # Of two samples of ones: 2 for each of four weights and the bias.
            assert norms[0] == pytest.approx(20.0**0.5)


def test_a_fused_optimizer_takes_the_flag_of_all_ranks(ranks: list[Any]) -> None:
    for found in ranks:
        (first, scale), (second, lower), (third, same) = found["adam"]
        assert first == second != third
        assert (scale, lower, same) == (2.0**16, 2.0**15, 2.0**15)


def test_ranks_that_do_not_share_the_parameter_are_refused(ranks: list[Any]) -> None:
    for found in ranks:
        assert "sync_over() got the ranks" in found["refusal"]
