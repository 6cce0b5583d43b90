"""Tensors that kernels cannot take are refused before anything is written, and tables serve again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import autoamp_kernels
import numpy as np
import pytest
import torch
from autoamp_kernels.calls import tables
from autoamp_kernels.library import library
from autoamp_kernels.tables import CODES, Role, Tables
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

ROLES = (Role("params", written=True), Role("grads", (torch.float32, torch.bfloat16)))


def lists(**changed: list[Tensor]) -> dict[str, Any]:
    made = {name: [torch.ones(4), torch.ones(6)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    return {**made, "halves": [torch.ones(4).half(), torch.ones(6).half()], **changed}


def aliased() -> dict[str, Any]:
    shared = torch.ones(9)
    return lists(params=[shared[:4], shared[3:]])


def read_and_written() -> dict[str, Any]:
    one = torch.ones(6)
    return lists(params=[torch.ones(4), one], grads=[torch.ones(4), one])


@pytest.mark.parametrize(("make", "message"), [
    (lambda: lists(grads=[torch.ones(4)]), r"grads has 1 tensors and params has 2; give one for each"),
    (lambda: lists(grads=[torch.ones(4), torch.ones(5)]), r"grads\[1\] has 5 elements; it must have 6, as params\[1\]"),
    (lambda: lists(params=[torch.ones(4), torch.ones(3, 4)[:, ::2]]), r"params\[1\] is not contiguous.*\.contiguous"),
    (lambda: lists(params=[torch.ones(4), torch.ones(6).double()]), r"params\[1\] has dtype torch.float64; it must be"),
    (lambda: lists(grads=[torch.ones(4), torch.ones(6).half()]), r"grads\[1\] has dtype torch.float16.*for each dtype"),
    (lambda: lists(grads=[torch.ones(4), torch.ones(6, device="meta")]), r"grads\[1\] is on meta and params\[0\] on"),
    (lambda: lists(grads=[torch.ones(4), torch.ones(6).to_sparse()]), r"grads\[1\] .*(layout|dense)"),
    (lambda: lists(params=[torch.ones(4).half(), torch.ones(6).half()]), r"halves are given, but params are in half"),
    (aliased, r"params\[0\] and params\[1\] share memory"),
    (read_and_written, r"grads\[1\] and params\[1\] share memory"),
], ids=lambda value: None if callable(value) else "")  # fmt: skip
def test_refused_before_anything_is_written(make: Callable[[], dict[str, Any]], message: str) -> None:
    given = make()
    with pytest.raises(autoamp_kernels.ArgumentError, match=message):
        autoamp_kernels.adam_(**given, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, step=1)
    for tensors in given.values():
        assert all(bool((tensor.to_dense() == 1).all()) for tensor in tensors if tensor.device.type == "cpu")


@pytest.mark.parametrize("name", ["lr", "found_inf", "grad_scale", "grad_factor", "step"])
def test_numbers_on_a_device_must_be_one_element(name: str) -> None:
    numbers: dict[str, Any] = {"lr": 0.1, "step": 1, name: torch.ones(2)}
    with pytest.raises(autoamp_kernels.ArgumentError, match=rf"{name} has dtype torch.float32, shape \(2,\)"):
        autoamp_kernels.adam_(**lists(), beta1=0.9, beta2=0.99, eps=1e-8, **numbers)


def test_a_table_serves_again_until_a_tensor_changes() -> None:
    tables = Tables()
    params, grads = [torch.ones(4), torch.ones(6)], [torch.ones(4), torch.ones(6)]

    def table() -> Any:
        return tables.table("kernel", ROLES, (params, grads))

    first = table()
    grads[1] = torch.ones(6)
    second = table()
    assert second.written is first.written
    assert second.columns["params"] is first.columns["params"]
    assert second.columns["grads"].pointers.tolist() == [grad.data_ptr() for grad in grads]
    # The same object at the same address, of another size.
    params[1].data, grads[1].data = params[1].data[:5], grads[1].data[:5]
    assert table().counts.tolist() == [4, 5]
    params[0].data = torch.ones(2, 2).data
    grads[0].data = grads[0].data.view(2, 2).t()
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"grads\[0\] is not contiguous"):
        table()


def moved(tensors: list[Tensor]) -> None:
    tensors[1].data = tensors[1].data.clone()


def replaced(tensors: list[Tensor]) -> None:
    tensors[1] = tensors[1].clone()


def replaced_by_a_view(tensors: list[Tensor]) -> None:
    tensors[1] = tensors[1].view(-1)


def grown(tensors: list[Tensor]) -> None:
    tensors[1].set_(torch.ones(6))  # type: ignore[call-overload]


@pytest.mark.parametrize("change", [moved, replaced, replaced_by_a_view, grown, list.reverse])
@pytest.mark.parametrize("name", ["params", "exp_avgs", "halves"])
def test_what_changed_of_lists_that_are_written_is_noticed(name: str, change: Callable[[list[Tensor]], None]) -> None:
    """And all numbers are those of a call that knew nothing of one before."""

    def stepped(*, anew: bool) -> list[Tensor]:
        given = {key: [torch.arange(6.0), torch.arange(6.0, 12.0)] for key in ("params", "exp_avgs", "exp_avg_sqs")}
        given["halves"] = [torch.zeros(6).half() for _ in range(2)]
        for turn in range(4):
            if turn == 2:
                if name == "halves" and change is grown:
                    given[name][1].set_(torch.ones(6).half())  # type: ignore[call-overload]
                else:
                    change(given[name])
            if anew:
                tables.clear()
            grads = [torch.full((6,), 0.5 + turn), torch.full((6,), 0.25)]
            autoamp_kernels.adam_(**given, grads=grads, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, step=turn + 1)
        return [tensor for tensors in given.values() for tensor in tensors]

    assert all(map(torch.equal, stepped(anew=False), stepped(anew=True)))


def test_the_same_tensors_in_other_roles_are_another_call() -> None:
    made = lists()
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    largest = [torch.zeros(4), torch.zeros(6)]
    autoamp_kernels.adam_(**made, **numbers, step=1)
    del made["halves"]
    autoamp_kernels.adam_(**made, **numbers, step=2)
    autoamp_kernels.adam_(**made, **numbers, step=3, max_exp_avg_sqs=largest)
    assert all(bool((tensor > 0).all()) for tensor in largest)
    made["grads"] = made["params"]
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"grads\[0\] and params\[0\] share memory"):
        autoamp_kernels.adam_(**made, **numbers, step=4)
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"exp_avgs has 1 tensors and params has 2"):
        autoamp_kernels.adam_(**{**lists(), "exp_avgs": made["exp_avgs"][:1]}, **numbers, step=4)


def test_a_view_of_another_dtype_is_another_tensor() -> None:
    """At the same address, of as many elements, while the first one lives."""
    made = lists()
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    autoamp_kernels.adam_(**made, **numbers, step=1)
    first = made["halves"]
    made["halves"] = [half.view(torch.bfloat16) for half in first]
    autoamp_kernels.adam_(**made, **numbers, step=2)
    assert all(map(torch.equal, made["halves"], (param.bfloat16() for param in made["params"])))
    averages = made["exp_avgs"]
    made["exp_avgs"] = [averages[0], averages[1].view(torch.int32)]
    with pytest.raises(autoamp_kernels.ArgumentError, match=r"exp_avgs\[1\] has dtype torch.int32; it must be float32"):
        autoamp_kernels.adam_(**made, **numbers, step=3)


def test_lists_that_are_only_read_may_be_of_other_sizes_each_time() -> None:
    norms = torch.empty(2)
    for size in (4, 4, 4, 9, 2):
        autoamp_kernels.scale_([torch.ones(size), torch.ones(6)], norms=norms)
        assert norms.tolist() == pytest.approx([size**0.5, 6**0.5])


def test_tensors_are_not_kept_alive() -> None:
    made = lists()
    for step in (1, 2, 3):
        autoamp_kernels.adam_(**made, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, step=step)
    kept = [weakref.ref(tensor) for tensors in made.values() for tensor in tensors]
    made.clear()
    assert not any(reference() is not None for reference in kept)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=8),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=8),
)
def test_shared_memory_is_found(read: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    """As by comparing each byte."""
    written: list[tuple[int, int]] = []
    for begin, size in sorted(others):
        if not written or begin >= sum(written[-1]):
            written.append((begin, size))
    bytes_written = {at for begin, size in written for at in range(begin, begin + size)}
    wanted = [bool(bytes_written & set(range(begin, begin + size))) for begin, size in read]
    begins, sizes = (np.array([piece[i] for piece in read], dtype=np.int64) for i in (0, 1))
    from_, to = (np.array([piece[0] + i * piece[1] for piece in written], dtype=np.int64) for i in (0, 1))
    found = library().shared(
        begins.ctypes.data, sizes.ctypes.data, len(read), from_.ctypes.data, to.ctypes.data, len(written)
    )
    assert found == (wanted.index(True) if True in wanted else -1)


def test_another_tensor_in_the_place_of_a_dead_one_is_checked_anew() -> None:
    """At the same address, of the same size, and often with the same identity."""
    tables, memory = Tables(), torch.zeros(4, dtype=torch.int16)
    roles = (Role("params", (torch.float16, torch.bfloat16), written=True),)
    for _ in range(5):
        for dtype in (torch.float16, torch.bfloat16):
            params = [memory.view(dtype)]
            assert tables.table("kernel", roles, (params,)).columns["params"].dtype == CODES[dtype]
            params.clear()


def test_the_oldest_table_goes() -> None:
    tables = Tables(kept=1)
    one, two = ([torch.ones(2)], [torch.ones(2)]), ([torch.ones(2)], [torch.ones(2)])
    first = tables.table("kernel", ROLES, one)
    tables.table("kernel", ROLES, two)
    assert tables.table("kernel", ROLES, one) is not first


def test_new_gradients_are_checked_against_what_is_written() -> None:
    params, firsts, seconds = ([torch.ones(4), torch.ones(6)] for _ in range(3))

    def step(grads: list[Tensor]) -> None:
        autoamp_kernels.adam_(params, grads, firsts, seconds, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, step=1)

    step([torch.ones(4), torch.ones(6)])
    for wrong, message in (
        ([torch.ones(4), firsts[1]], r"grads\[1\] and exp_avgs\[1\] share memory"),
        ([torch.ones(4), torch.ones(7)[1:].half()], r"grads\[1\] has dtype torch.float16 and grads\[0\]"),
        ([torch.ones(4), torch.ones(5)], r"grads\[1\] has 5 elements"),
        ([torch.ones(4), torch.ones(12)[::2]], r"grads\[1\] is not contiguous"),
    ):
        before = [param.clone() for param in params]
        with pytest.raises(autoamp_kernels.ArgumentError, match=message):
            step(wrong)
        assert all(map(torch.equal, params, before))
    step([torch.ones(4), torch.ones(6)])
    assert not torch.equal(params[1], before[1])


def test_25000_tensors() -> None:
    """Of one to seven elements, empty ones among them, cut from one: as one tensor of all of them."""
    sizes = [i % 8 for i in range(25_000)]
    flats = [torch.rand(sum(sizes)) for _ in range(4)]
    wholes = [[flat.clone()] for flat in flats]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    for step in (1, 2):
        autoamp_kernels.adam_(*(list(flat.split(sizes)) for flat in flats), **numbers, step=step)
        autoamp_kernels.adam_(*wholes, **numbers, step=step)
    assert all(torch.equal(flat, whole) for flat, (whole,) in zip(flats, wholes, strict=True))


def test_more_than_31_bits_of_elements() -> None:
    """Pages that nobody writes to take no place: of this memory the last page alone is written."""
    big = torch.from_numpy(np.zeros(2**31 + 70_000, np.int16)).view(torch.bfloat16)
    small = torch.full((3,), 2.0, dtype=torch.bfloat16)
    big[-1], big[2**31 - 1], big[2**31] = 3.0, -7.0, 5.0
    norms, total, found = torch.empty(2), torch.empty(()), torch.zeros(())
    autoamp_kernels.scale_([big, small], norms=norms, total=total, found_inf=found)
    assert norms.tolist() == pytest.approx([83**0.5, 12**0.5])
    assert total == pytest.approx(95**0.5)
    assert found == 0


def test_counts_beyond_31_bits() -> None:
    """Memory that nobody writes to takes no place."""
    tables = Tables()
    big = torch.empty(2**31 + 5, dtype=torch.bfloat16)
    roles = (Role("params", (torch.bfloat16,), written=True),)
    table = tables.table("kernel", roles, ([big, torch.empty(3, dtype=torch.bfloat16)],))
    assert table.counts.tolist() == [2**31 + 5, 3]
    assert table.first_chunk.tolist() == [0, 2**16 + 1, 2**16 + 2]
