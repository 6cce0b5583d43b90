"""docs/lists.md: cast lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoamp
from tests.behaviour.training import started

A, HALF = torch.rand(4, 4), torch.rand(4, 4).half()


@pytest.mark.parametrize(
    ("key", "given", "dtype"),
    [("fp16", A, torch.float16), ("fp32", HALF, torch.float32), ("none", A, torch.float32)],
)
def test_a_key_says_what_the_arguments_of_its_ops_become(key: str, given: torch.Tensor, dtype: torch.dtype) -> None:
    started(lists={key: ["matmul"]})
    assert torch.matmul(given, given).dtype == dtype


def test_an_entry_of_a_later_list_beats_that_of_the_default_list() -> None:
    started()
    assert torch.matmul(A, A).dtype == torch.float16
    started(lists={"fp32": ["matmul"]})
    assert torch.matmul(HALF, HALF).dtype == torch.float32


def test_promote_casts_to_the_widest_dtype_of_the_arguments() -> None:
    started(lists={"promote": ["matmul"]})
    assert torch.matmul(A, HALF).dtype == torch.float32
    assert torch.matmul(HALF, HALF).dtype == torch.float16


def test_a_bare_name_means_every_spelling_and_a_dotted_one_that_alone() -> None:
    started(lists={"fp32": ["softmax"]})
    assert HALF.softmax(-1).dtype == torch.nn.functional.softmax(HALF, -1).dtype == torch.float32
    started(lists={"none": ["softmax"], "fp32": ["torch.softmax"]})
    assert torch.softmax(HALF, -1).dtype == torch.float32
    assert HALF.softmax(-1).dtype == torch.float16


def test_an_operator_has_names_of_its_own() -> None:
    started(lists={"fp32": ["mul"]})
    assert torch.mul(HALF, HALF).dtype == torch.float32
    assert (HALF * HALF).dtype == torch.float16
    started(lists={"fp32": ["__mul__"]})
    assert (HALF * HALF).dtype == torch.float32


def test_tensors_that_are_no_floats_of_16_or_32_bits_are_not_cast() -> None:
    started()
    assert (A.double() @ A.double()).dtype == torch.float64
    assert (A.long() @ A.long()).dtype == torch.int64
    assert A.dtype == torch.float32


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"fp32": ["sofmax"]}, r"unknown op 'sofmax' under fp32.*did you mean 'softmax'"),
        ({"fp23": ["softmax"]}, "fp23"),
        ({"fp32": "softmax"}, "array"),
        ({"fp32": ["torch.sofmax"]}, "'torch.sofmax' names nothing"),
    ],
)
def test_a_list_with_a_fault_is_an_error_and_nothing_is_patched(lists: Any, message: str) -> None:
    with pytest.raises(autoamp.ListFileError, match=message):
        autoamp.init(device_type="cpu", lists=lists)
    assert autoamp.current_handle() is None


def test_explain_names_the_rule_of_an_op_with_file_and_line() -> None:
    assert "lists/default.toml:" in str(started().explain("softmax"))
