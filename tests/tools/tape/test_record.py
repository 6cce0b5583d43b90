"""What a recording sees, and where it says that it has not seen all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autoamp.tools.tape import CannotRerun, Place, Rerun, record
from tests.tools.tape.programs import last_value

# -- values that no operator made --


def write_in_another_thread(x: torch.Tensor) -> None:
    thread = threading.Thread(target=x.add_, args=(1,))
    thread.start()
    thread.join()


def test_write_that_torch_counts_and_no_operator_made() -> None:
    x = torch.ones(3)
    with record() as tape:
        x * 2
        write_in_another_thread(x)
        x * 2
    assert tape.incomplete == "a tensor was written to, and no operator of this thread did that"


def result_of_another_thread() -> list[torch.Tensor]:
    x = torch.ones(3) * 2
    write_in_another_thread(x)
    return [x * 2]


def tensor_and_its_data() -> list[torch.Tensor]:
    x = torch.ones(3)
    x.add_(1).add_(1)
    # torch counts writes to the two apart: 0 and 2.
    before, between = x.data * 2, x * 2
    x.add_(1)
    return [before, between, x.data * 2]


def random_result_that_is_written_to() -> list[torch.Tensor]:
    noise = torch.rand(5)
    noise[1:].mul_(2)
    return [noise + 1]


def tensor_that_shows_another_memory() -> list[torch.Tensor]:
    x, y = torch.zeros(3), torch.arange(3.0)
    before = x * 2
    x.set_(y.untyped_storage(), 0, (3,), (1,))
    after = x * 2
    x.add_(1)
    return [before, after]


def memory_that_is_not_initialized() -> list[torch.Tensor]:
    x = torch.empty(1000, dtype=torch.float16)
    x[:500] = 1
    return [x[:500].sum()]


@pytest.mark.parametrize(
    "program",
    [
        result_of_another_thread, tensor_and_its_data, random_result_that_is_written_to,
        tensor_that_shows_another_memory, memory_that_is_not_initialized,
    ],
)  # fmt: skip
def test_a_rerun_has_the_values_of_the_program(program: Callable[[], list[torch.Tensor]]) -> None:
    with record() as tape:
        results = program()
    assert tape.incomplete is None
    assert all(torch.equal(last_value(tape, result), result) for result in results)


def test_random_result_that_is_written_to_afterwards() -> None:
    with record() as tape:
        noise = torch.rand(3)
        noise + 1
    noise.add_(1)
    with pytest.raises(CannotRerun, match="written to since"):
        Rerun(tape).finish()


def test_tensors_without_values_are_left_out() -> None:
    with record() as tape:
        torch.empty(2, device="meta") + 1
    assert list(tape.ops) == []
    assert tape.incomplete is None


def test_results_of_collectives_are_recorded_and_not_computed_again() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with record() as tape:
            x = torch.ones(4) * 3
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            result = x * 2
    finally:
        dist.destroy_process_group()
    assert tape.incomplete is None
    assert [op.name for op in tape.ops if op.is_recorded] == ["c10d::allreduce_"] * 2
    assert torch.equal(last_value(tape, result), result)


def test_step_that_is_undone() -> None:
    norm, outside, fresh = torch.nn.BatchNorm1d(4), torch.zeros(4), []
    drawn = torch.ones(3)
    before = [buffer.clone() for buffer in norm.buffers()]
    with record() as tape:
        norm(torch.randn(8, 4))
        outside.view(2, 2)[0] += 1
        norm.weight.data.mul_(2)
        fresh += [torch.zeros(2).add_(1), torch.rand(2).mul_(0)]
        # Written to twice, with random numbers in between.
        drawn.normal_()
        drawn.mul_(2)
    assert int(norm.num_batches_tracked) == 1
    tape.undo()
    assert all(map(torch.equal, norm.buffers(), before))
    assert outside.tolist() == [0.0] * 4
    assert norm.weight.tolist() == [1.0] * 4
    assert [value.tolist() for value in fresh] == [[1.0, 1.0], [0.0, 0.0]]
    assert drawn.tolist() == [1.0] * 3


def test_writes_are_undone_after_an_operator_that_is_missing() -> None:
    x = torch.zeros(2)
    with record() as tape:
        torch.ones(2, 2).to_sparse() * 2
        x.add_(1)
    assert tape.incomplete is not None
    tape.undo()
    assert not x.any()


def test_write_after_the_data_of_a_tensor_was_replaced() -> None:
    x = torch.zeros(3)
    with record() as tape:
        y = x * 2
    x.data = torch.ones(3)
    x.add_(1)
    assert last_value(tape, y).tolist() == [0.0] * 3


# -- places and phases --


def test_operators_of_a_backward_pass_have_the_place_of_the_forward_operator() -> None:
    here = ["a"]
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with record(lambda: Place(here[0])) as tape:
        y = x @ w
        here[0] = "b"
        loss = y.exp().sum()
        here[0] = "backward"
        loss.backward()
    places = {(op.name, op.phase): op.place.function for op in tape.ops}
    assert places["aten::mm", "forward"] == places["aten::mm", "backward"] == "a"
    assert places["aten::exp", "forward"] == places["aten::mul", "backward"] == "b"
    assert {name for name, place in places.items() if place == "backward"} == {("aten::ones_like", "forward")}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again(reentrant: bool) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    with record() as tape:
        y = checkpoint(lambda x: torch.tanh(x @ w).exp(), w * 2, use_reentrant=reentrant)
        y.sum().backward()
    phases = [op.phase for op in tape.ops if op.name == "aten::tanh"]
    assert phases == ["forward", "recomputation"]
    assert w.grad is not None
    assert torch.equal(last_value(tape, w.grad), w.grad)


def test_node_of_a_graph_of_another_thread_has_no_place() -> None:
    x, losses, tapes = torch.rand(4, requires_grad=True), [], []

    def forward() -> None:
        losses.append(x.exp().sum())

    def backward() -> None:
        # Numbers of nodes begin at 0 in each thread, so these are the same as those of the other graph.
        with record(lambda: Place("here")) as tape:
            x.sin().mean()
            losses[0].backward()
        tapes.append(tape)

    for target in (forward, backward):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    places = {op.name: op.place for op in tapes[0].ops if op.phase == "backward"}
    assert places["aten::mul"] == Place()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_backward_functions_of_the_program_and_of_torch() -> None:
    x = torch.rand(1, 4, 3, 3, requires_grad=True)
    with record(lambda: Place("here")) as tape:
        torch.nn.CrossMapLRN2d(2)(Doubled.apply(x)).sum().backward()
    places = [(op.name, op.place.function) for op in tape.ops if op.phase == "backward"]
    # The last one is of the program. The others have no line of the program, not even that of `backward()`.
    assert places[-1] == ("aten::mul", "Doubled")
    assert {name for name, place in places[:-1] if place is not None} <= {"aten::expand"}


# -- beside other modes --


class Noted(torch.Tensor):
    """A tensor of a class that notes the functions that are called with it."""

    calls: ClassVar[list[object]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_class_of_the_program_sees_nothing_of_the_recording() -> None:
    seen = []
    for recording in (contextlib.nullcontext(), record()):
        w = torch.ones(4).as_subclass(Noted).requires_grad_()
        Noted.calls.clear()
        with recording:
            (w * w).sum().backward()
        seen.append(list(Noted.calls))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("inside", [False, True])
def test_flop_counter(inside: bool) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    counter = FlopCounterMode(display=False)
    outer, inner = (record(), counter) if inside else (counter, record())
    with outer as one, inner as other:
        (w @ w).sum().backward()
    tape = one if inside else other
    assert counter.get_total_flops() == 3 * 2 * 4**3
    assert w.grad is not None
    assert torch.equal(last_value(tape, w.grad), w.grad)


def test_compiled_code_runs_as_it_does_without_a_recording() -> None:
    graphs, runs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: (runs.append(1), graph(*args))[1]

    def step(x):
        y = torch.relu(x @ x)
        torch._dynamo.graph_break()
        return (y.sin() + 1).sum()

    x = torch.randn(3, 3)
    compiled = torch.compile(step, backend=backend)
    expected, made, ran = compiled(x), len(graphs), len(runs)
    whole = torch.compile(lambda x: x.sin() + 1, backend=backend, fullgraph=True)
    with record() as tape:
        result = compiled(x)
    assert torch.equal(result, expected)
    assert (len(graphs), len(runs)) == (made, 2 * ran)
    assert torch.equal(last_value(tape, result), result)
    with record() as tape:
        whole(x)
    assert tape.incomplete == "torch.compile has made code"
    assert len(graphs) == made + 1


# -- incomplete tapes --


def compiles() -> None:
    torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda: TwoTensor(torch.ones(2), torch.ones(2)) + 1, "a tensor is a TwoTensor"),
        (lambda: torch.ones(2, 2).to_sparse() * 2, "a tensor has no memory of its own"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().clone(), "conjugated"),
        (lambda: torch.ones(2**20).add(1) + torch.rand(2**20), "the tape would hold more than 1 MiB"),
        (compiles, "torch.compile has made code"),
    ],
)
def test_incomplete_tape_says_why(program, reason: str) -> None:
    with record(limit=2**20) as tape:
        program()
    assert reason in (tape.incomplete or "")
    with pytest.raises(CannotRerun, match=reason.partition(" ")[0]):
        Rerun(tape)


def test_error_of_the_program_leaves_the_recording() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"), record():
        torch.ones(2, 3) @ torch.ones(2, 3)
    with record() as tape:
        torch.ones(2) + 1
    assert [op.name for op in tape.ops] == ["aten::ones", "aten::add"]


def test_backward_pass_of_another_thread_is_not_on_the_tape_and_its_results_are() -> None:
    w = torch.randn(4, requires_grad=True)
    with record() as tape:
        loss = (w * w).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert w.grad is not None
        result = w.grad * 2
    assert {op.phase for op in tape.ops} == {"forward"}
    assert torch.equal(last_value(tape, result), result)
