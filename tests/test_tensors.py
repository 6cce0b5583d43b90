"""Walking nested arguments, and the defaults of device and dtype."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from autoamp.tensors import default_device_type, iter_tensors, map_tensors, without_grad

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]

leaves = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.floats(allow_nan=False, width=16),
    st.booleans(),
    st.text(max_size=3),
    st.sampled_from([torch.Size([2, 3]), torch.float32, torch.device("cpu"), slice(1, 2)]),
    st.sampled_from(DTYPES).map(lambda dtype: torch.ones(2, dtype=dtype)),
)


class Point(NamedTuple):
    x: Any
    y: Any


def nests(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    )


nested = st.recursive(leaves, nests, max_leaves=10)


def shape(value: Any) -> Any:
    """What a nest is made of, with the identity of every leaf."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value), [shape(item) for item in value]
    if isinstance(value, dict):
        return type(value), {key: shape(item) for key, item in value.items()}
    return id(value)


@settings(deadline=None, max_examples=200)
@given(nested)
def test_map_never_mutates_and_converts_every_tensor(value: Any) -> None:
    before = shape(value)
    seen: list[int] = []
    mapped = map_tensors(value, lambda tensor: seen.append(id(tensor)) or tensor.to(torch.complex128))  # type: ignore[func-returns-value]
    assert seen == [id(tensor) for tensor in iter_tensors(value)]
    assert shape(value) == before
    assert [tensor.dtype for tensor in iter_tensors(mapped)] == [torch.complex128] * len(list(iter_tensors(value)))
    assert type(mapped) is type(value)
    # Where nothing changes the very argument is returned.
    assert map_tensors(value, lambda tensor: tensor) is value


def test_only_what_changed_is_built_anew() -> None:
    kept, changed = [torch.ones(1)], [torch.ones(1), 3]
    value = (kept, {"a": changed}, kept)
    target = changed[0]
    mapped = map_tensors(value, lambda tensor: tensor * 2 if tensor is target else tensor)
    assert mapped[0] is mapped[2] is kept
    assert mapped[1]["a"] is not changed
    assert mapped[1]["a"][1] == 3
    assert value[1]["a"] is changed


def test_named_tuples_return_types_and_packed_sequences_keep_their_type() -> None:
    found = map_tensors(torch.max(torch.ones(2, 2), dim=0), lambda tensor: tensor.to(torch.float64))
    assert type(found) is torch.return_types.max
    assert found.values.dtype == torch.float64
    Pair = namedtuple("Pair", "a b")
    mapped = map_tensors(Pair(torch.ones(1), 2), Tensor.half)
    assert type(mapped) is Pair
    assert mapped.a.dtype == torch.float16
    assert mapped.b == 2
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    mapped = map_tensors(packed, lambda tensor: tensor.half() if tensor.is_floating_point() else tensor)
    assert type(mapped) is type(packed)
    assert mapped.data.dtype == torch.float16
    assert mapped.batch_sizes is packed.batch_sizes


def test_dict_subclasses_keep_what_they_add() -> None:
    value: Any = defaultdict(list, a=torch.ones(1))
    mapped = map_tensors(value, Tensor.half)
    assert type(mapped) is defaultdict
    assert mapped["new"] == []
    assert value["a"].dtype == torch.float32
    assert "new" not in value


class NeedsTwo(list):  # type: ignore[type-arg]
    def __init__(self, items: Any, name: str) -> None:
        super().__init__(items)
        self.name = name


class NeedsTwoTuple(tuple):  # type: ignore[type-arg]
    def __new__(cls, items: Any, name: str) -> NeedsTwoTuple:
        return super().__new__(cls, items)


@pytest.mark.parametrize(("kind", "plain"), [(NeedsTwo, list), (NeedsTwoTuple, tuple)])
def test_a_sequence_that_cannot_be_rebuilt_becomes_a_plain_one(kind: Any, plain: type) -> None:
    value = kind([torch.ones(1)], "name")
    mapped = map_tensors(value, Tensor.half)
    assert type(mapped) is plain
    assert mapped[0].dtype == torch.float16
    assert map_tensors(value, lambda tensor: tensor) is value


def test_other_leaves_are_converted_on_request() -> None:
    class Batch:
        pass

    first, second = Batch(), Batch()
    mapped = map_tensors({"a": [first, 1, torch.ones(1)]}, Tensor.half, lambda leaf: second if leaf is first else leaf)
    assert mapped["a"][0] is second
    assert mapped["a"][1] == 1
    assert mapped["a"][2].dtype == torch.float16
    value = [first, (1, "a")]
    assert map_tensors(value, Tensor.half, lambda leaf: leaf) is value


@pytest.mark.parametrize(("accelerator", "device_type"), [(torch.device("cuda"), "cuda"), (None, "cpu")])
def test_default_device_type(monkeypatch: pytest.MonkeyPatch, accelerator: object, device_type: str) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    assert default_device_type() == device_type


@pytest.mark.parametrize("before", [True, False])
def test_without_grad(before: bool) -> None:
    @without_grad
    def told(fails: bool = False) -> bool:
        """Tell."""
        if fails:
            raise ValueError
        return torch.is_grad_enabled()

    with torch.set_grad_enabled(before):
        assert not told()
        assert torch.is_grad_enabled() is before
        with pytest.raises(ValueError):  # noqa: PT011, this very one
            told(fails=True)
        assert torch.is_grad_enabled() is before
    assert told.__doc__ == "Tell."
