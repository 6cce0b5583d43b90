"""A sparse matrix times an activation, as graph networks have it: as under torch.autocast, and in fp32 elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoamp

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")

SIZE = 6
BIAS = torch.linspace(-1, 1, SIZE * 4).reshape(SIZE, 4)

Product = Callable[[Tensor, Tensor], Tensor]

# Lambdas, since a patched function is another object than the one that was imported.
# What torch.autocast takes, where the matrix is in the COO layout.
OF_AUTOCAST: dict[str, Product] = {
    "mm": lambda sparse, x: torch.mm(sparse, x),
    "matmul": lambda sparse, x: torch.matmul(sparse, x),
    "@": lambda sparse, x: sparse @ x,
    "Tensor.mm": lambda sparse, x: sparse.mm(x),
    "spmm": lambda sparse, x: torch.spmm(sparse, x),
    "spmm, by name": lambda sparse, x: torch.spmm(sparse, mat2=x),
    "dsmm": lambda sparse, x: torch.dsmm(sparse, x),
    "addmm": lambda sparse, x: torch.addmm(BIAS, sparse, x),
    "Tensor.addmm": lambda sparse, x: BIAS.addmm(sparse, x),
    "linear": lambda sparse, x: F.linear(x.t(), sparse),
    "from the right": lambda sparse, x: x.t() @ sparse,
    "matrix and vector": lambda sparse, x: sparse @ x[:, 0],
}
# What it refuses.
OTHERS: dict[str, Product] = {
    "sparse.mm": lambda sparse, x: torch.sparse.mm(sparse, x),
    "sparse.addmm": lambda sparse, x: torch.sparse.addmm(BIAS, sparse, x),
    "sparse.addmm of activations": lambda sparse, x: torch.sparse.addmm(x, sparse, x),
    "addmm_": lambda sparse, x: BIAS.clone().addmm_(sparse, x),
    "mv": lambda sparse, x: torch.mv(sparse, x[:, 0]),
    "two sparse": lambda sparse, x: torch.mm(torch.mm(sparse, sparse).to_dense(), x),
}
OF_COO: dict[str, Product] = {
    "bmm": lambda sparse, x: torch.bmm(torch.stack([sparse, sparse]), torch.stack([x, x])),
    **{
        f"{name}, without gradients": lambda sparse, x, name=name: (
            getattr(torch, name)(sparse, x.detach()).to_dense() * x.float()
        )
        for name in ("hspmm", "hsmm", "smm")
    },
}
OF_CSR: dict[str, Product] = {
    "addmv": lambda sparse, x: torch.addmv(BIAS[:, 0], sparse, x[:, 0]),
    "sampled_addmm": lambda sparse, x: torch.sparse.sampled_addmm(sparse, x, x.t()).to_dense(),
}


def matrix() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(SIZE, SIZE, generator=generator)
    return (dense * (dense > 0.2)).to_sparse_coo()


class Graph(nn.Module):
    """A layer, whose output is half under casts, and the product under test."""

    def __init__(self, product: Product, sparse: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4)
        self.product, self.sparse = product, sparse
        self.dtypes: tuple[torch.dtype, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        result = self.product(self.sparse, hidden)
        self.dtypes = hidden.dtype, result.dtype
        return result


def results(model: Graph) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the layer's weight, in fp32."""
    model.zero_grad()
    output = model(torch.linspace(-1, 1, SIZE * 5).reshape(SIZE, 5).cos())
    output.float().square().sum().backward()
    assert model.layer.weight.grad is not None
    return output.detach().float(), model.layer.weight.grad.clone()


CASES = [(name, "coo") for name in (*OF_AUTOCAST, *OTHERS, *OF_COO)] + [
    (name, "csr") for name in (*OF_AUTOCAST, *OTHERS, *OF_CSR)
]


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize(("scope", "half"), [("global", torch.float16), ("modules", torch.bfloat16)])
def test_a_sparse_product_is_that_of_autocast_or_of_fp32(name: str, layout: str, scope: str, half: torch.dtype) -> None:
    product = {**OF_AUTOCAST, **OTHERS, **OF_COO, **OF_CSR}[name]
    model = Graph(product, matrix() if layout == "coo" else matrix().to_sparse_csr())
    reference = results(model)
    of_autocast = layout == "coo" and name in OF_AUTOCAST
    if of_autocast:
        with torch.autocast("cpu", dtype=half):
            reference = results(model)
    before = model.sparse.clone()
    handle = autoamp.init(dtype=half, scope=scope)
    output, gradient = results(model)
    handle.deactivate()
    assert model.dtypes[0] is half
    if of_autocast:
        assert model.dtypes[1] is half
        assert torch.equal(output, reference[0])
    torch.testing.assert_close(output, reference[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(gradient, reference[1], rtol=0.05, atol=0.2)
    assert model.sparse.dtype is torch.float32
    assert torch.equal(model.sparse.to_dense(), before.to_dense())


@pytest.mark.parametrize("name", ["mm", "spmm", "sparse.mm", "linear"])
def test_gradients_of_a_sparse_parameter(name: str, half: torch.dtype) -> None:
    sparse, product = nn.Parameter(matrix()), {**OF_AUTOCAST, **OTHERS}[name]
    model = Graph(product, sparse)
    results(model)
    assert sparse.grad is not None
    reference, sparse.grad = sparse.grad.to_dense(), None
    handle = autoamp.init(dtype=half)
    results(model)
    handle.deactivate()
    assert sparse.grad is not None
    torch.testing.assert_close(sparse.grad.to_dense(), reference, rtol=0.05, atol=0.1)
