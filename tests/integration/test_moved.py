"""Packages that have moved: the names of 0.2 give the modules of today themselves, by every way to import."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import runpy
import subprocess
import sys

import pytest

import autoamp

# Modules of 0.2, with the classes in them whose instances programs pickle, and with functions that they import.
NAMES = """
autoamp.levels LEVELS check_level initialize
autoamp.fp16_utils FP16_Optimizer DynamicLossScaler LossScaler FP16Model tofp16
autoamp.fp16_utils.fp16_optimizer FP16_Optimizer
autoamp.fp16_utils.loss_scalers DynamicLossScaler LossScaler
autoamp.fp16_utils.models convert_network network_to_half prep_param_lists
autoamp.optimizers FusedAdagrad FusedAdam FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad FusedSGD
autoamp.optimizers.adagrad FusedAdagrad
autoamp.optimizers.adam FusedAdam
autoamp.optimizers.groups FusedOptimizer
autoamp.optimizers.lamb FusedLAMB
autoamp.optimizers.mixed_precision_lamb FusedMixedPrecisionLamb
autoamp.optimizers.novograd FusedNovoGrad
autoamp.optimizers.sgd FusedSGD
autoamp.parallel DistributedDataParallel LARC Reducer SyncBatchNorm multiproc
autoamp.parallel.distributed DistributedDataParallel Reducer flat_dist_call
autoamp.parallel.larc LARC
autoamp.parallel.multiproc main
autoamp.parallel.sync_batchnorm SyncBatchNorm convert_syncbn_model
autoamp.normalization FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm manual_rms_norm
autoamp.formulas Rule
autoamp.compat install_as_apex uninstall real_apex fastai1
autoamp.compat.alias install_as_apex
autoamp.compat.amp.api initialize
autoamp.compat.amp.properties O0 O1 O2 O3 Properties
autoamp.compat.amp.scaler LossScaler
autoamp.compat.amp.state AmpHandle AmpState ScalerView
autoamp.compat.early.optimizers ContribFusedAdam FP16_Optimizer FusedAdam
autoamp.compat.early.scalers DynamicLossScaler LossScaler PokedDynamicScaler PokedStaticScaler
autoamp.compat.fastai1 enable disable
autoamp.compat.layers.contrib FastLayerNorm SoftmaxCrossEntropyLoss
autoamp.compat.layers.mlp FusedDense FusedDenseGeluDense MLP
autoamp.compat.layers.norm_functions FusedLayerNormAffineFunction FastLayerNormFN
autoamp.compat.layers.rnn GRU LSTM LSTMCell ReLU Tanh bidirectionalRNN mLSTM stackedRNN
autoamp.compat.layers.weight_norm WeightNorm
autoamp.compat.multi_tensor.tensor_lists MultiTensorApply multi_tensor_scale
"""
MOVED = {line.split()[0]: line.split()[1:] for line in NAMES.strip().splitlines()}
PUBLIC = ["compat", "fp16_utils", "normalization", "optimizers", "parallel"]


@pytest.mark.parametrize("old", MOVED)
def test_names_of_an_old_module_are_those_of_today(old: str) -> None:
    module = importlib.import_module(old)
    spec = importlib.util.find_spec(old)
    assert spec is not None
    for name in MOVED[old]:
        value = getattr(module, name)
        if isinstance(value, type):
            # What a pickle of 0.2 names is the class that a pickle of today names.
            assert pickle.loads(f"c{old}\n{name}\n.".encode()) is pickle.loads(pickle.dumps(value)) is value


def test_an_old_name_is_the_module_itself() -> None:
    from autoamp.optimizers import adam

    assert (
        sys.modules["autoamp.optimizers.adam"] is adam is importlib.import_module("autoamp.apex.optimizers.fused_adam")
    )
    assert autoamp.parallel is importlib.import_module("autoamp.apex.parallel")
    assert autoamp.compat is importlib.import_module("autoamp.apex")
    assert adam.__spec__.name == adam.__name__ == "autoamp.apex.optimizers.fused_adam"
    # One without classes, of which others have taken the old ones.
    multiproc = importlib.import_module("autoamp.parallel.multiproc")
    assert importlib.reload(multiproc) is multiproc


def test_a_package_that_moved_runs_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["multiproc"])
    monkeypatch.delitem(sys.modules, "autoamp.parallel.multiproc", raising=False)
    with pytest.raises(autoamp.UsageError, match="no script was given"):
        runpy.run_module("autoamp.parallel.multiproc", run_name="__main__", alter_sys=True)


def test_public_packages_are_listed_and_no_others_are_found() -> None:
    assert set(PUBLIC) <= set(dir(autoamp))
    for name in ("autoamp.nope", "autoamp.optimizers.nope", "autoamp.compat.nope"):
        assert importlib.util.find_spec(name) is None


def test_the_finder_imports_no_torch() -> None:
    program = "import autoamp, sys; print('torch' in sys.modules, hasattr(autoamp, '_nope'))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False False\n"
