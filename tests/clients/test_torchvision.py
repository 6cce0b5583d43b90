"""Torchvision's detectors train and predict, as they do under torch.amp: its own ops have rules."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.clients.apex_programs import importable_only_with_its_ops

pytestmark = pytest.mark.client("torchvision")

Losses = dict[str, Tensor]
LEVELS = ("O0", "O1", "O2", "O3")
WAYS: dict[str, dict[str, Any]] = {
    "init": {}, "as autoamp run": {"scope": "modules"}, **{level: {"opt_level": level} for level in LEVELS},
}  # fmt: skip
# Few boxes, as some ops are in Python here.
_FEW = {
    **{f"rpn_{when}_nms_top_n_{mode}": 16 for when in ("pre", "post") for mode in ("train", "test")},
    "box_batch_size_per_image": 8, "box_detections_per_img": 4,
}  # fmt: skip
BOXES, SCORES = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]]), torch.tensor([0.9, 0.8, 0.7])
DETECTORS: dict[str, dict[str, int]] = {"FasterRCNN": _FEW, "MaskRCNN": _FEW, "RetinaNet": {}, "FCOS": {}}


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    """Stand in for the C++ op of a torchvision that is made for CUDA, where it cannot load beside a torch for CPUs."""
    with contextlib.ExitStack() as stack:
        if importable_only_with_its_ops("torchvision"):
            library = stack.enter_context(torch.library._scoped_library("torchvision", "FRAGMENT"))
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.impl("nms", nms, "CPU")
            from torchvision.ops import boxes

            patched = stack.enter_context(pytest.MonkeyPatch.context())
            patched.setattr(boxes, "_assert_has_ops", lambda: None)
            # It compiles its `roi_align` in Python.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """As torchvision's kernel for CPUs, which refuses the same dtypes."""
    if dets.dtype is not scores.dtype:
        raise RuntimeError("dets should have the same type as scores")
    if dets.dtype in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f'"nms_kernel" not implemented for {dets.dtype}')
    from torchvision.ops import box_iou

    left, kept = scores.argsort(descending=True), []
    while len(left):
        kept.append(left[0])
        left = left[1:][box_iou(dets[left[:1]], dets[left[1:]])[0] <= iou_threshold]
    return torch.stack(kept) if kept else left


def detector(name: str) -> nn.Module:
    """A detector of small images with random weights."""
    from torchvision.models import detection
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    model: nn.Module = getattr(detection, name)(backbone, num_classes=5, min_size=64, max_size=64, **DETECTORS[name])
    return model


def images() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    target = {
        "boxes": torch.tensor([[8.0, 8.0, 40.0, 48.0]]), "labels": torch.tensor([1]),
        "masks": torch.ones(1, 64, 64, dtype=torch.uint8),
    }  # fmt: skip
    return [torch.rand(3, 64, 64)], [target]


def trained(model: nn.Module, step: Callable[[Tensor], None]) -> tuple[Losses, dict[str, Tensor]]:
    """The losses of a step, and what the model predicts then."""
    model.train()
    torch.manual_seed(2)
    losses: Losses = model(*images())
    step(sum(losses.values(), torch.zeros(())))
    model.eval()
    with torch.no_grad():
        (predicted,) = model(images()[0])
    return losses, predicted


def cases() -> Iterator[Any]:
    """Yield dtype, detector and way. The default suite has each detector in bf16, and one in each way."""
    for half, name, way in itertools.product((torch.bfloat16, torch.float16), DETECTORS, WAYS):
        usual = half is torch.bfloat16 and (way == "init" or name == "FasterRCNN")
        yield pytest.param(half, name, way, marks=[] if usual else [pytest.mark.variants])


def initialized(model: nn.Module, optimizer: Any, half: torch.dtype, **settings: Any) -> None:
    """Set a detector up for a level, as docs/lists.md says where that level casts models."""
    name, half_models = type(model).__name__, settings["opt_level"] in ("O2", "O3")
    if half_models and half is torch.bfloat16 and name in ("FasterRCNN", "MaskRCNN"):
        settings["lists"] = {"modules": {"roi_heads": "fp32"}}
    part: Any = model.backbone if half_models and half is torch.float16 and name == "FCOS" else model
    autoamp.initialize(part, optimizer, dtype=half, device_type="cpu", loss_scale=1.0, verbosity=0, **settings)


@functools.cache
def losses_in_fp32(name: str) -> Losses:
    return trained(detector(name), lambda loss: loss.backward())[0]


@pytest.mark.parametrize(("half", "name", "way"), [*cases()])
def test_a_detector_trains_and_predicts(half: torch.dtype, name: str, way: str) -> None:
    reference = losses_in_fp32(name)
    settings = WAYS[way]
    model = detector(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if "opt_level" in settings:
        initialized(model, optimizer, half, **settings)
    else:
        autoamp.init(dtype=half, device_type="cpu", loss_scale=1.0, **settings)
    handle = autoamp.current_handle()
    assert handle is not None

    def step(loss: Tensor) -> None:
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    losses, predicted = trained(model, step)
    for loss, expected in zip(losses.values(), reference.values(), strict=True):
        # At O2 and O3 boxes are half.
        assert loss.item() == pytest.approx(expected.item(), rel=0.2 if way in ("O2", "O3") else 0.1, abs=0.05)
    assert torch.isfinite(predicted["boxes"]).all()
    assert all(torch.isfinite(param.grad).all() for param in model.parameters() if param.grad is not None)


def test_boxes_that_torchvision_refuses_in_bf16_have_a_note() -> None:
    model = autoamp.initialize(
        detector("FasterRCNN"), opt_level="O3", dtype=torch.bfloat16, device_type="cpu", verbosity=0
    )
    with pytest.raises(TypeError, match="boxes must of float type") as caught:
        model(*images())
    assert 'initialize(..., lists={"modules": {"roi_heads": "fp32"}})' in caught.value.__notes__[0]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_ops_of_torchvision_in_half_models_compute_in_fp32(half: torch.dtype, level: str) -> None:
    from torchvision import ops as tv

    class Pools(nn.Module):
        def forward(self, image: Tensor, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
            assert image.dtype is boxes.dtype is half
            return tv.nms(boxes, scores, 0.5), tv.roi_align(image, [boxes.float()], 4).to(half)

    image, boxes, scores = torch.rand(1, 3, 32, 32), BOXES, SCORES
    expected = tv.nms(boxes, scores, 0.5), tv.roi_align(image.to(half).float(), [boxes], 4).to(half).float()
    model = autoamp.initialize(Pools(), opt_level=level, dtype=half, device_type="cpu", verbosity=0)
    assert all(map(torch.equal, model(image, boxes, scores), expected))
    autoamp.current_handle().deactivate()
    with pytest.raises(RuntimeError, match="not implemented for"):
        tv.nms(boxes.to(half), scores.to(half), 0.5)


@pytest.mark.parametrize("scope", ["global", "modules"])
def test_ops_of_torchvision_compute_in_fp32(half: torch.dtype, scope: Any) -> None:
    from torchvision import ops as tv

    image, boxes, scores = torch.rand(1, 3, 32, 32), BOXES, SCORES
    expected = tv.nms(boxes, scores, 0.5), tv.roi_align(image.to(half).float(), [boxes], 4)
    autoamp.init(dtype=half, device_type="cpu", scope=scope)
    assert torch.equal(tv.nms(boxes.to(half), scores, 0.5), expected[0])
    assert torch.equal(tv.batched_nms(boxes.to(half), scores.to(half), torch.zeros(3), 0.5), expected[0])
    assert torch.equal(tv.roi_align(image.to(half), [boxes.to(half)], 4), expected[1])
