"""Programs with formulas by hand that fp16 breaks, under the whole command: exit code, page, entry, and its effect."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launches import Ended, launched, written

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
base = torch.rand(6, 40) * {scale}
y = torch.randint(6, (800,)); x = base[y] + {scale} / 15 * torch.randn(800, 40)
"""
TAIL = """
net = nn.Sequential(nn.Linear(40, 64), ByHand(), nn.ReLU(), nn.Linear(64, 6))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for e in range(3):
    for i in torch.randperm(800).split(80):
        loss = F.cross_entropy(net(x[i]), y[i]); opt.zero_grad(); loss.backward(); opt.step()
print(f"accuracy: {(net(x).argmax(1) == y).float().mean():.3f}")
"""
# By the name of the program: how large its data is, its formula, and the op that overflows.
FORMULAS = {
    "rms": (900, "x / ((x * x).mean(-1, keepdim=True) + 1e-8).sqrt()", "mul"),
    "long_norm": (900, "8 * x / torch.einsum('bi,bi->b', x, x).sqrt()[:, None]", "einsum"),
    "softmax": (300, "(x / 50).float().tanh() + (e := x * x / 64 * x * x / 64) / (e.sum(-1, True) + 1)", "mul"),
    "log_sum_exp": (300, "x / 50 + (s := x * x) * 0 + torch.log(1 + (s * s).sum(-1, True)) / 9", "mul"),
}
RUN = ["run", "--device-type", "cpu", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs are."""
    files = {}
    for name, (scale, formula, _) in FORMULAS.items():
        module = f"class ByHand(nn.Module):\n    def forward(self, x):\n        return {formula}\n"
        files[f"{name}.py"] = HEAD.replace("{scale}", str(scale)) + module + TAIL
    everything = "import runpy\n" + "".join(f"runpy.run_path('{name}.py', run_name='__main__')\n" for name in FORMULAS)
    return written(tmp_path_factory.mktemp("by_hand"), {**files, "all_of_them.py": everything})


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """All in fp32; each in fp16, with a page; one without a page, and in bf16."""
    fp16 = [*RUN, "--dtype", "fp16", "--fail-on", "overflow"]
    runs = {"plain": ["python", "all_of_them.py"]}
    runs |= {name: [*fp16, "--report", f"{name}.html", f"{name}.py"] for name in FORMULAS}
    runs["without a page"] = [*fp16, "rms.py"]
    runs["bf16"] = [*RUN, "--dtype", "bf16", "--fail-on", "overflow", "rms.py"]
    return launched(folder, runs)


@pytest.fixture(scope="module")
def cured(folder: Path, ended: dict[str, Ended]) -> dict[str, Ended]:
    """Each with the lines of its page as a list."""
    for name in FORMULAS:
        (folder / f"{name}.toml").write_text(lines_of(folder / f"{name}.html"), encoding="utf-8")
    fp16 = [*RUN, "--dtype", "fp16", "--fail-on", "overflow"]
    return launched(folder, {name: [*fp16, "--lists", f"{name}.toml", f"{name}.py"] for name in FORMULAS})


@pytest.fixture(scope="module")
def plain(ended: dict[str, Ended]) -> dict[str, float]:
    """The accuracy of each in fp32."""
    assert ended["plain"].code == 0, ended["plain"].err
    return dict(zip(FORMULAS, map(accuracy, ended["plain"].out.splitlines()), strict=True))


def accuracy(out: str) -> float:
    return float(out.partition("accuracy: ")[2])


def part_of(page: Path, pattern: str) -> str:
    """Return the one part of a page that a pattern has as its group."""
    (found,) = re.findall(pattern, page.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def lines_of(page: Path) -> str:
    """Return the lines for a list file that a page shows."""
    return html.unescape(re.sub(r"</?span>", "", part_of(page, r'<pre class="diff".*?<code>(.*?)</code>')))


def document_of(page: Path) -> dict[str, Any]:
    return dict(json.loads(part_of(page, r'<script type="application/json" id="data">(.*?)</script>')))


@pytest.mark.parametrize("name", FORMULAS)
def test_an_overflow_fails_the_run_and_comes_first_on_its_page(
    name: str, folder: Path, plain: dict[str, float], ended: dict[str, Ended]
) -> None:
    op = FORMULAS[name][2]
    assert plain[name] > 0.9
    assert ended[name].code == 3, ended[name].err
    line = (folder / f"{name}.py").read_text().splitlines().index(f"        return {FORMULAS[name][1]}") + 1
    assert f"{op} in module 1 at {name}.py:{line} made inf" in ended[name].err
    document = document_of(folder / f"{name}.html")
    overflow = (document["faults"] + document["skips"]["groups"])[0]["overflow"]
    assert f"add fp32 = {json.dumps(overflow['fp32_names'])} to the list file" in ended[name].err
    verdict = document["verdict"]
    assert verdict["level"] == "bad"
    assert re.search(rf"{op} (in module 1 )?at {name}.py:{line}", verdict["sentence"])
    assert [entry["op"] for entry in document["remedies"] if entry["policy"] == "fp32"] == overflow["fp32_names"]
    assert all(f'"{called}"' in lines_of(folder / f"{name}.html") for called in overflow["fp32_names"])


@pytest.mark.parametrize("name", FORMULAS)
def test_with_the_told_entry_it_is_as_in_fp32(
    name: str, folder: Path, plain: dict[str, float], cured: dict[str, Ended]
) -> None:
    assert cured[name].code == 0, cured[name].err
    assert accuracy(cured[name].out) >= plain[name] - 0.02


def test_it_is_told_without_a_page_too_and_bf16_holds_it(plain: dict[str, float], ended: dict[str, Ended]) -> None:
    assert ended["without a page"].code == 3
    assert "the gradients of 0.weight" in ended["without a page"].err
    assert ended["bf16"].code == 0
    assert accuracy(ended["bf16"].out) >= plain["rms"] - 0.02
