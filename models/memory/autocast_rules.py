"""Operations that autocast computes in float32 on CUDA and in half precision on the CPU, for traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

#: ``AT_FORALL_FP32`` of ``ATen/autocast_mode.h``: inputs in half precision are cast to float32.
_ELEMENTWISE = "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus"
_NORMS = (
    "layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity dist pdist cdist "
    "renorm logsumexp"
)
_LOSSES = (
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits"
)
_UPSAMPLING = (
    "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
)
SINGLE = frozenset(f"{_ELEMENTWISE} {_NORMS} {_LOSSES} {_UPSAMPLING}".split())
#: ``AT_FORALL_FP32_SET_OPT_DTYPE``: the result is float32 unless another dtype is requested.
_RESULTS = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
SINGLE_RESULT = frozenset(_RESULTS.split())
#: Prefixes of some of these names in Python.
_BEFORE = frozenset({"__pow__", "__rpow__", "norm", "interpolate", "cross_entropy"})
#: The CPU first casts all inputs to the widest dtype; CUDA's kernels read each in its own.
_MIXED = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "index_copy"})
_HALF = (torch.float16, torch.bfloat16)


class CudaCasts(TorchFunctionMode):
    """Apply CUDA's autocast rules on the CPU, inside the context.

    Both cast the inputs of matrix products to half precision. CUDA computes these operations in float32 and keeps
    float32 for the backward pass, where the CPU keeps the dtype of the inputs.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, in float32 where CUDA would."""
        name, options = func.__name__, dict(kwargs or {})
        if func in (torch.Tensor.backward, torch.autograd.backward):
            return self._backward(*args)
        if torch.is_autocast_enabled("cpu"):
            if name in SINGLE_RESULT and _is_half(args[0]):
                options["dtype"] = options.get("dtype") or torch.float32
            elif name in SINGLE or name in _BEFORE:
                args, options = tree_map(_widened, (args, options))
            elif name in _MIXED:
                with torch.autocast("cpu", enabled=False):
                    return func(*args, **options)
        return func(*args, **options)

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a scalar in this mode too: checkpointed blocks recompute their forwards in it."""
        with self:
            _engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _widened(value: Any) -> Any:
    return value.float() if _is_half(value) else value
