"""What an op writes to reaches the caller's tensors, whatever list the op is put in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autoamp

HALF, FP32 = torch.float16, torch.float32
POLICIES = ["fp16", "fp32", "promote"]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def listed(policy: str) -> Any:
    """Put ops under a policy that they do not have by default."""

    def init(*names: str) -> None:
        autoamp.init(device_type="cpu", dtype=HALF, lists={"extends": [], policy: list(names)})

    return init


def result_dtype(policy: str, *dtypes: torch.dtype) -> torch.dtype:
    if policy == "promote":
        return FP32 if len(set(dtypes)) > 1 else dtypes[0]
    return HALF if policy == "fp16" else FP32


@pytest.mark.parametrize("source", [FP32, HALF], ids=str)
@pytest.mark.parametrize("weights", [True, False])
def test_batch_norm_keeps_its_statistics(listed: Any, policy: str, source: torch.dtype, weights: bool) -> None:
    def state() -> dict[str, Any]:
        weight, bias = (torch.linspace(0.5, 1.5, 3), torch.linspace(-1, 1, 3)) if weights else (None, None)
        return {"running_mean": torch.zeros(3), "running_var": torch.ones(3), "weight": weight, "bias": bias}

    x = torch.linspace(-2, 3, 2 * 3 * 5).reshape(2, 3, 5).to(source)
    control, found, again = state(), state(), state()
    reference = F.batch_norm(x.float(), **control, training=True)

    listed("batch_norm")
    by_name = F.batch_norm(x, training=True, momentum=0.1, **found)
    by_place = torch.batch_norm(
        x, again["weight"], again["bias"], again["running_mean"], again["running_var"], True, 0.1, 1e-5, False
    )  # fmt: skip

    for output, running in ((by_name, found), (by_place, again)):
        # Statistics in another dtype than the input's are promoted with it.
        assert output.dtype == (FP32 if policy == "promote" else result_dtype(policy))
        torch.testing.assert_close(output.float(), reference, rtol=5e-3, atol=5e-3)
        for name in ("running_mean", "running_var"):
            assert running[name].dtype == FP32
            torch.testing.assert_close(running[name], control[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_statistics_of_any_dtype_are_updated(listed: Any, policy: str, name: str) -> None:
    listed(name)
    train = {"batch_norm": {"training": True}, "instance_norm": {"use_input_stats": True}}[name]
    for dtype in (FP32, HALF):
        x, mean, var = torch.linspace(-2, 3, 30).reshape(2, 3, 5).to(dtype), torch.zeros(3), torch.ones(3)
        mean, var = mean.to(dtype), var.to(dtype)
        output = getattr(F, name)(x, mean, var, **train)
        assert output.dtype == result_dtype(policy, dtype)
        torch.testing.assert_close(mean.float(), 0.1 * x.float().mean((0, 2)), rtol=2e-3, atol=2e-3)
        assert var.dtype == dtype
        assert getattr(F, name)(x, None, None, **train).dtype == result_dtype(policy, dtype)


def test_embedding_renormalises_the_weight(listed: Any, policy: str) -> None:
    weight = torch.full((4, 3), 2.0)
    listed("embedding", "embedding_bag")
    index = torch.tensor([[0, 2]])
    output = F.embedding(index, weight, max_norm=1.0)
    assert output.dtype == result_dtype(policy, FP32)
    torch.testing.assert_close(output.float(), torch.full((1, 2, 3), 3**-0.5), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weight[0], torch.full((3,), 3**-0.5))
    assert torch.equal(weight[1], torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "name", ["relu", "leaky_relu", "hardswish", "silu", "mish", "elu", "selu", "relu6", "hardtanh"]
)
def test_the_flag_inplace_writes_to_the_argument(listed: Any, policy: str, name: str) -> None:
    listed(name)
    function = getattr(F, name)
    for source in (FP32, HALF):
        given, x = torch.linspace(-2, 2, 9).to(source), torch.linspace(-2, 2, 9).to(source)
        output = function(given)
        assert output.dtype == result_dtype(policy, source)
        assert torch.equal(given, x)
        assert function(x, inplace=True) is x
        assert x.dtype == source
        torch.testing.assert_close(x.float(), output.float(), rtol=2e-3, atol=2e-3)


def test_the_flag_inplace_has_gradients(listed: Any) -> None:
    leaf = torch.linspace(-2, 2, 9, requires_grad=True)
    listed("leaky_relu")
    hidden = leaf * 1.0
    F.leaky_relu(hidden, 0.5, True)
    hidden.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.where(leaf > 0, 1.0, 0.5))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        F.leaky_relu(leaf, inplace=True)


@pytest.mark.parametrize("source", [FP32, HALF], ids=str)
def test_what_only_writes_to_self_writes_to_self(listed: Any, source: torch.dtype) -> None:
    listed("copy_", "zero_", "uniform_", "__setitem__")
    x = torch.ones(4, dtype=source)
    assert x.copy_(torch.full((4,), 3.0)) is x
    assert torch.equal(x, torch.full((4,), 3.0, dtype=source))
    x[1] = torch.tensor(5.0)
    assert x.tolist() == [3.0, 5.0, 3.0, 3.0]
    x.uniform_(7, 8)
    assert bool((x >= 7).all())
    assert x.zero_() is x
    assert x.tolist() == [0.0] * 4
    assert x.dtype == source


def test_casts_off_and_sparse_arguments_pass_through(listed: Any) -> None:
    listed("batch_norm")
    handle = autoamp.current_handle()
    assert handle is not None
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    with handle.disable_casts():
        assert F.batch_norm(x, mean, var, training=True).dtype == FP32
    assert bool(mean.any())
    with pytest.raises(NotImplementedError, match="batch_norm"):
        torch.native_batch_norm(x.to_sparse(), None, None, None, None, True, 0.1, 1e-5)


def test_errors_are_torchs_own(listed: Any) -> None:
    listed("batch_norm", "relu")
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        F.batch_norm(torch.ones(1, 3), torch.zeros(3), torch.ones(3), training=True)
    with pytest.raises(TypeError, match="batch_norm"):
        F.batch_norm(torch.ones(2, 3))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="relu"):
        F.relu()  # type: ignore[call-arg]
