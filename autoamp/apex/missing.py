"""Names of Apex that are not provided: a loud error that says so and what to use in their place."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from typing import Any

_PAGE = "see the migration page, docs/migration.md, for what torch has in its place"

_ATTENTION = "use torch.nn.functional.scaled_dot_product_attention or torch.nn.MultiheadAttention"

# By the longest dotted name that matches. On what has no entry the page is the last word.
REMEDIES = {
    "amp_C": "use the torch._foreach functions, or the fused optimizers of torch.optim and apex.optimizers",
    "amp_C.update_scale_hysteresis": "use torch.amp.GradScaler, or autoamp.DynamicLossScaler",
    "apex.RNN": "use torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN",
    "apex.RNN.RNNBackend.RNNCell": "build networks with apex.RNN.LSTM(...); a cell of your own is best a "
    "torch.nn.Module",
    "apex.RNN.cells": "use torch.nn.LSTMCell, GRUCell or RNNCell, apex.RNN.mLSTM for the multiplicative LSTM",
    "apex._autocast_utils": "use torch.amp.autocast",
    "apex.amp._initialize": "call apex.amp.initialize, which does the whole of it",
    "apex.amp._process_optimizer": "call apex.amp.initialize, which prepares the optimizers; "
    "apex.amp.master_params gives what they step",
    "apex.amp.opt": "call handle.wrap_optimizer(optimizer, num_loss)",
    "apex.amp.rnn_compat": "recurrent layers follow the lists by themselves; nothing need be called",
    "apex.amp.scaler": "use apex.amp.scaler.LossScaler, or autoamp.DynamicLossScaler",
    "apex.amp.utils": "casts are cached by the handle, and tensor.half() and torch.is_floating_point do the rest",
    "apex.amp.wrap": "register the function: apex.amp.register_half_function(module, name), register_float_function or "
    "register_promote_function; a list set bans functions",
    "apex.contrib.bottleneck": "use torchvision.models.resnet.Bottleneck, under torch.compile",
    "apex.contrib.clip_grad": "use torch.nn.utils.clip_grad_norm_",
    "apex.contrib.conv_bias_relu": "use torch.nn.functional.conv2d and relu, under torch.compile",
    "apex.contrib.cudnn_gbn": "use apex.parallel.SyncBatchNorm",
    "apex.contrib.fmha": _ATTENTION,
    "apex.contrib.focal_loss": "use torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "use torch.nn.GroupNorm",
    "apex.contrib.groupbn": "use apex.parallel.SyncBatchNorm, or torch.nn.BatchNorm2d in channels_last",
    "apex.contrib.index_mul_2d": "write in1[index] * in2, under torch.compile",
    "apex.contrib.layer_norm": "use torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": _ATTENTION,
    "apex.contrib.openfold_triton": "use torch.nn.LayerNorm and torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.optimizers": "it reduces gradients and owns the parameters' memory itself; use torch's "
    "DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer(params, "
    "optimizer_class=apex.optimizers.FusedAdam, lr=...), or torch.distributed.fsdp.fully_shard",
    "apex.contrib.peer_memory": "use torch.distributed",
    "apex.contrib.sparsity": "use torch.ao.pruning.WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), "
    "zeros_per_block=2), or torch.sparse.to_sparse_semi_structured; ASP of an installed apex works beside autoamp",
    "apex.contrib.transducer": "use torchaudio.transforms.RNNTLoss",
    "apex.contrib.xentropy": "use torch.nn.functional.cross_entropy(label_smoothing=...)",
    "apex.amp.__version__": "read apex.__version__",
    "apex.fused_dense": "use torch.nn.functional.linear, which the cast lists know",
    "apex.mlp": "use apex.mlp.MLP, or torch.nn.Linear under torch.compile",
    "apex.fp16_utils": "use apex.fp16_utils.FP16_Optimizer, or apex.amp.initialize(opt_level='O2')",
    "apex.normalization": "use torch.nn.LayerNorm or torch.nn.RMSNorm",
    "apex.optimizers": "use torch.optim with fused=True, such as torch.optim.AdamW(params, fused=True)",
    "apex.optimizers.Lamb": "use apex.optimizers.FusedLAMB",
    "apex.optimizers.NpuFusedAdamP": "use timm.optim.AdamP",
    "apex.optimizers.NpuFusedBertAdam": "use apex.optimizers.FusedAdam(params, lr, bias_correction=False, "
    "max_grad_norm=1.0) with an LR scheduler for the warmup",
    "apex.optimizers.NpuFusedLamb": "use apex.optimizers.FusedLAMB",
    "apex.optimizers.NpuFusedRMSpropTF": "use timm.optim.RMSpropTF",
    "apex.optimizers.FusedAdamSWA": "use torch.optim.AdamW(fused=True) with torch.optim.swa_utils.AveragedModel",
    "apex.parallel": "DistributedDataParallel has no such part here; use torch.nn.parallel.DistributedDataParallel",
    "apex.pyprof": "use torch.profiler, with torch.cuda.nvtx for ranges",
    "apex.reparameterization": "use torch.nn.utils.parametrize.register_parametrization",
    "apex.transformer": "use Megatron Core, or torch.distributed.tensor.parallel and torch.distributed.pipelining",
    "apex_C": "use torch._utils._flatten_dense_tensors and _unflatten_dense_tensors",
}


def remedy_for(name: str) -> str:
    """Return what to use in place of a dotted name of Apex."""
    while name not in REMEDIES and "." in name:
        name = name.rpartition(".")[0]
    remedy = REMEDIES.get(name, _PAGE)
    return remedy if remedy is _PAGE else f"{remedy}; docs/migration.md has more"


def missing_names(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module of the tree.

    It raises AttributeError, so that ``hasattr`` and ``getattr`` with a default work, and ImportError where the name is
    wanted by ``from module import name``, which would hide the message of an AttributeError.
    """

    def __getattr__(name: str) -> Any:
        message = f"{module}.{name} is not provided by autoamp's {module.partition('.')[0]}: "
        message += remedy_for(f"{module}.{name}")
        if not (name.startswith("__") and name.endswith("__")) and is_import_from(sys._getframe(1)):
            raise ImportError(message, name=module)
        raise AttributeError(message, name=name)

    return __getattr__


def is_import_from(frame: Any) -> bool:
    """Whether a frame is at a ``from ... import``."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and bool(dis.opname[code[at]] == "IMPORT_FROM")
