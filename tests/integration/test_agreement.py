"""On any mesh of ranks a step is skipped on all of them or on none. On four spawned processes, over gloo."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import autoamp
from autoamp.fp16_utils import FP16_Optimizer
from tests.integration.collectives import counted
from tests.integration.spawned import on_ranks

pytestmark = pytest.mark.processes

RANKS = 4
INF = float("inf")
NO_CASTS: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "lists": {"extends": []}}
KINDS = ("replicated", "sharded", "plain")
LAYOUTS = ("1-D", "2-D", "two meshes")
WAYS = ("scale_loss", "auto_scale", "O1", "O2", "FP16_Optimizer")
# All of them for one way. For each other way every layout once and every kind once.
CASES = [
    (layout, first, way)
    for (row, layout), (column, first), (turn, way) in itertools.product(*map(enumerate, (LAYOUTS, KINDS, WAYS)))
    if turn == 0 or (row + column + turn) % 3 == 0
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
        place = Replicate() if kind == "replicated" else Shard(0)
        if layout == "1-D":
            return nn.Parameter(DTensor.from_local(whole[:2].clone(), self.line, [place], run_check=False))
        if layout == "2-D":
            both = [Replicate(), place] if kind == "replicated" else [place, Shard(0)]
            return nn.Parameter(DTensor.from_local(whole[:2].clone(), self.square, both, run_check=False))
        mesh = self.square["data" if kind == "replicated" else "tensor"]
        return nn.Parameter(DTensor.from_local(whole[:2].clone(), mesh, [place], run_check=False))


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def loss_of(params: list[nn.Parameter], factors: list[float]) -> Tensor:
    parts = [(local(param).float() * factor).sum() for param, factor in zip(params, factors, strict=True)]
    return torch.stack(parts).sum()


class Holder(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.own = nn.ParameterList(params)

    def forward(self, factors: list[float]) -> Tensor:
        return loss_of(list(self.own), factors)


Step = Callable[[list[float]], None]


@contextlib.contextmanager
def training(way: str, params: list[nn.Parameter]) -> Iterator[tuple[Step, Callable[[], float], Any]]:
    """Give what takes a step with these factors, what tells the scale, and the optimizer."""
    optimizer: Any = torch.optim.SGD(params, lr=0.5, foreach=False)
    model = Holder(params)
    if way in ("O1", "O2"):
        lists = None if way == "O2" else NO_CASTS["lists"]
        options: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float16, "lists": lists, "verbosity": 0}
        autoamp.initialize(model, optimizer, opt_level=way, loss_scale="dynamic", **options)
        handle: Any = autoamp.current_handle()
    else:
        handle = autoamp.init(**NO_CASTS)
    if way == "FP16_Optimizer":
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)

    def backward(factors: list[float]) -> None:
        loss = loss_of(params, factors)
        if way == "FP16_Optimizer":
            optimizer.backward(loss)
        elif way == "auto_scale":
            loss.backward()
        else:
            with autoamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()

    def step(factors: list[float]) -> None:
        optimizer.zero_grad()
        backward(factors)
        optimizer.step()

    if way == "auto_scale":
        handle.auto_scale()
    try:
        yield step, (lambda: optimizer.loss_scale if way == "FP16_Optimizer" else handle.loss_scale), optimizer
    finally:
        handle.deactivate()


def one_case(layouts: Layouts, layout: str, first: str, way: str) -> list[Any]:
    """For inf on each rank, in each kind of gradient: the step that is skipped, the next one, the scale, the cost."""
    kinds = [first, *(kind for kind in KINDS if kind != first)]
    dtype = torch.float16 if way == "FP16_Optimizer" else torch.float32
    params = [layouts.parameter(layout, kind, dtype) for kind in kinds]
    told = []
    with training(way, params) as (step, scale, _):
        factors = [0.25] * len(kinds)
        step(factors)
        for bad, place in itertools.product(range(RANKS), range(len(kinds))):
            before, scale_before = [local(param).detach().clone() for param in params], scale()
            spoilt = [INF if index == place and dist.get_rank() == bad else one for index, one in enumerate(factors)]
            with counted() as calls, CommDebugMode() if not told else contextlib.nullcontext() as comms:
                step(spoilt)
            same = all(torch.equal(local(param), old) for param, old in zip(params, before, strict=True))
            step(factors)
            moved = [
                float((old - local(param).detach()).float().mean()) for param, old in zip(params, before, strict=True)
            ]
            told.append((same, scale_before, scale(), max(calls(), comms.get_total_counts() if comms else 0), moved))
    return told


# -- other things, each a program of its own --


def clipped(layouts: Layouts) -> dict[str, Any]:
    """The norm of whole gradients, clipped, and how many collectives both took."""
    params = [layouts.parameter("2-D", kind, torch.float32) for kind in KINDS]
    found: dict[str, Any] = {}
    for norm_type in (2.0, 3.0, INF):
        with training("scale_loss", params):
            optimizer = torch.optim.SGD(params, lr=1.0, foreach=False)
            handle: Any = autoamp.current_handle()
            with handle.scale_loss(loss_of(params, [1.0, 2.0, 3.0]), optimizer) as scaled:
                scaled.backward()
            with CommDebugMode() as comms:
                norm = handle.clip_grad_norm_(optimizer, 1.0, norm_type)
                optimizer.step()
            gradients = [local(param.grad) for param in params]
            found[str(norm_type)] = (float(norm), comms.get_total_counts(), [float(g.max()) for g in gradients])
            optimizer.zero_grad()
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


def asked(layouts: Layouts, way: str) -> list[Any]:
    """Stages of a pipeline: ranks with parameters of their own, of which one overflows, or has no gradient."""
    stage = nn.Parameter(torch.full((dist.get_rank() + 1,), 3.0))
    told = []
    with training("scale_loss", [stage]):
        handle: Any = autoamp.current_handle()
        if way == "initialize":
            holder, optimizer = Holder([stage]), torch.optim.SGD([stage], lr=1.0)
            options: dict[str, Any] = {**NO_CASTS, "loss_scale": "dynamic", "verbosity": 0}
            autoamp.initialize(holder, optimizer, process_group=dist.group.WORLD, **options)
            handle = autoamp.current_handle()
        else:
            optimizer = torch.optim.SGD([stage], lr=1.0)
            handle.sync_over(dist.group.WORLD, replicas=1)
        for factor, skips in ((1.0, None), (INF, 2), (1.0, None), (1.0, 1)):
            optimizer.zero_grad()
            before = stage.detach().clone()
            if dist.get_rank() != skips or factor == INF:
                mine = factor if dist.get_rank() == 2 else 1.0
                with handle.scale_loss(loss_of([stage], [mine]), optimizer) as scaled:
                    scaled.backward()
            with CommDebugMode() as comms:
                norm = float(handle.clip_grad_norm_(optimizer, 1e9)) if way == "sync_over" else 0.0
                optimizer.step()
            told.append((torch.equal(before, stage), handle.loss_scale, comms.get_total_counts(), norm))
        told.append(handle.state_dict())
        handle.deactivate()
    return told


def several_losses(layouts: Layouts) -> list[Any]:
    """Losses with scalers of their own: that of the loss which overflowed goes lower, on all ranks."""
    params = [layouts.parameter("1-D", kind, torch.float32) for kind in KINDS]
    optimizer, model = torch.optim.SGD(params, lr=0.1, foreach=False), Holder(params)
    options: dict[str, Any] = {**NO_CASTS, "verbosity": 0, "loss_scale": "dynamic", "num_losses": 2}
    autoamp.initialize(model, optimizer, **options)
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


def dropped(layouts: Layouts) -> list[Any]:
    """Gradients that overflowed on one rank and were dropped on all, without a step: the scale goes lower on all."""
    told = []
    for clears in (True, False):
        params = [layouts.parameter("1-D", kind, torch.float32) for kind in KINDS]
        with training("scale_loss", params) as (step, scale, optimizer):
            for factor in (INF if dist.get_rank() == 1 else 1.0, 1.0):
                with autoamp.scale_loss(loss_of(params, [1.0, factor, 1.0]), optimizer) as scaled:
                    scaled.backward()
                optimizer.zero_grad(set_to_none=clears)
            step([1.0, 1.0, 1.0])
            told.append((scale(), autoamp.current_handle().skipped_steps))  # type: ignore[union-attr]
    return told


def idle(layouts: Layouts) -> list[float]:
    """A rank that has no gradients in the first of two blocks of a step, as an expert without tokens."""
    params = [layouts.parameter("1-D", "sharded", torch.float32)]
    with training("scale_loss", params) as (_, _, optimizer):
        before = local(params[0]).detach().clone()
        for block in range(2):
            loss = torch.ones((), requires_grad=True) if block == 0 and dist.get_rank() == 3 else loss_of(params, [1.0])
            with autoamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
    return (before - local(params[0]).detach()).tolist()


def clipped_and_dropped(layouts: Layouts, kind: str) -> list[Any]:
    """Programs that look at the norm, and drop the gradients without a step where it is not finite."""
    params = [layouts.parameter("1-D", "plain" if kind == "asked" else kind, torch.float32)]
    told = []
    with training("scale_loss", params):
        handle: Any = autoamp.current_handle()
        optimizer = torch.optim.SGD(params, lr=0.5, foreach=False)
        if kind == "asked":
            handle.sync_over(dist.group.WORLD, replicas=1)
        for number in range(5):
            bad = number == 1
            optimizer.zero_grad()
            before = local(params[0]).detach().clone()
            # In a group that was asked for a rank may have nothing to drop.
            if not (bad and kind == "asked" and dist.get_rank() == 1):
                loss = loss_of(params, [INF if bad and dist.get_rank() == 3 else 1.0])
                with handle.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            norm = float(handle.clip_grad_norm_(optimizer, 1e9))
            if norm < INF:
                optimizer.step()
            moved = not torch.equal(before, local(params[0]))
            told.append((norm < INF, moved, handle.skipped_steps, handle.loss_scale))
    return told


def sharded_adam(layouts: Layouts) -> list[Any]:
    """A fused optimizer that takes the flag of an overflow, given flags of all ranks."""
    params = [layouts.parameter("1-D", "sharded", torch.float32)]
    optimizer = torch.optim.Adam(params, lr=0.5, fused=True)
    handle = autoamp.init(**NO_CASTS)
    told = []
    for factor in (1.0, INF if dist.get_rank() == 0 else 1.0, 1.0):
        optimizer.zero_grad()
        with handle.scale_loss(loss_of(params, [factor]), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        told.append((local(params[0]).tolist(), handle.loss_scale))
    handle.deactivate()
    return told


def refusals(layouts: Layouts) -> list[str]:
    messages = []
    with training("scale_loss", [layouts.parameter("two meshes", "sharded", torch.float32)]) as (step, _, _optimizer):
        handle: Any = autoamp.current_handle()
        for group, replicas in ((None, None), (dist.group.WORLD, 3)):
            with pytest.raises(autoamp.UsageError) as caught:
                handle.sync_over(group, replicas=replicas)
            messages.append(str(caught.value))
        handle.sync_over(layouts.square["data"].get_group())
        with pytest.raises(autoamp.UsageError) as caught:
            step([1.0])
        messages.append(str(caught.value))
    return messages


def found_by_rank() -> dict[Any, Any]:
    layouts = Layouts()
    found: dict[Any, Any] = {}
    for layout, first, way in CASES:
        found[layout, first, way] = one_case(layouts, layout, first, way)
    found["clipped"] = clipped(layouts)
    found["partial"] = {str(dtype): partial(layouts, dtype) for dtype in (torch.float16, torch.float32)}
    found["asked"] = {way: asked(layouts, way) for way in ("sync_over", "initialize")}
    found["losses"] = several_losses(layouts)
    found["dropped"] = dropped(layouts)
    found["clipped and dropped"] = {kind: clipped_and_dropped(layouts, kind) for kind in ("sharded", "asked")}
    found["idle"] = idle(layouts)
    found["adam"] = sharded_adam(layouts)
    found["refusals"] = refusals(layouts)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of four processes found."""
    return on_ranks(tmp_path_factory, RANKS, found_by_rank)


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


def test_clipping_goes_by_whole_gradients_and_costs_no_second_collective(ranks: list[Any]) -> None:
    whole = torch.cat([torch.full((2,), 1.0), torch.full((8,), 2.0), torch.full((8,), 3.0)])
    for found in ranks:
        for norm_type, (norm, collectives, left) in found["clipped"].items():
            expected = float(torch.linalg.vector_norm(whole, float(norm_type)))
            assert norm == pytest.approx(expected, rel=1e-6)
            assert left == pytest.approx([factor / expected for factor in (1.0, 2.0, 3.0)], rel=1e-5)
            assert collectives == 1


def test_gradients_that_are_added_up_are_looked_at_as_sums(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["partial"]["torch.float16"] == [(0, -4.0), (1, 0.0)]
        assert found["partial"]["torch.float32"] == [(0, -4.0), (0, -120000.0)]


@pytest.mark.parametrize("way", ["sync_over", "initialize"])
def test_stages_agree_where_they_are_asked_to(ranks: list[Any], way: str) -> None:
    for found in ranks:
        *steps, state = found["asked"][way]
        assert [same for same, *_ in steps][:3] == [False, True, False]
        assert [scale for _, scale, *_ in steps] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
        assert [collectives for *_, collectives, _ in steps] == [1] * 4
        assert state == ranks[0]["asked"][way][-1]
        if way == "sync_over":
            # Each rank's part counts once: 1 + 2 + 3 + 4 elements.
            assert steps[0][3] == pytest.approx(10.0**0.5)


def test_each_loss_has_its_own_scale_on_all_ranks(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["losses"] == [[2.0**16, 2.0**16], [2.0**15, 2.0**16], [2.0**15, 2.0**15]]


def test_dropped_gradients_lower_the_scale_of_all_ranks(ranks: list[Any]) -> None:
    for found in ranks:
        assert found["dropped"] == [(2.0**15, 1), (2.0**15, 1)]


def test_a_rank_may_be_idle_in_the_first_of_several_blocks(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        assert found["idle"] == [0.5 if rank == 3 else 1.0] * 2


@pytest.mark.parametrize("kind", ["sharded", "asked"])
def test_gradients_dropped_for_their_norm_lower_the_scale_of_all_ranks(ranks: list[Any], kind: str) -> None:
    for found in ranks:
        told = found["clipped and dropped"][kind]
        assert [finite for finite, *_ in told] == [True, False, True, True, True]
        # A rank may have had nothing to drop: it is the next step that tells all of them, and is skipped.
        assert [moved for _, moved, *_ in told] == [True, False, False, True, True]
        assert [skipped for *_, skipped, _ in told] == [0, 0, 1, 1, 1]
        assert [scale for *_, scale in told] == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15]


def test_a_fused_optimizer_takes_the_flag_of_all_ranks(ranks: list[Any]) -> None:
    for found in ranks:
        (first, scale), (second, lower), (third, same) = found["adam"]
        assert first == second != third
        assert (scale, lower, same) == (2.0**16, 2.0**15, 2.0**15)


def test_what_cannot_be_agreed_on_is_refused(ranks: list[Any]) -> None:
    for found in ranks:
        no_group, does_not_divide, apart = found["refusals"]
        assert "is not a process group" in no_group
        assert "does not divide the 4 ranks" in does_not_divide
        assert "sync_over() got the ranks" in apart
