"""NVIDIA apex's fused norms, where a probe shows that they work on the tensor's device."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
FusedNorm = Callable[[Tensor, Tensor, "Tensor | None", float], Tensor]


@functools.cache
def apex_norm(norm_type: str, device_type: str) -> FusedNorm | None:
    """Return apex's fused ``norm_type`` for ``device_type``, or None where torch's must serve.

    The choice is made per device, not per host: a model moved to the CPU must run there. apex may
    import and still lack its compiled part, so one tiny norm is built and run, once.
    """
    if device_type != "cuda":
        return None
    try:
        module = importlib.import_module("apex.normalization.fused_layer_norm")
        fused = _bind(module, norm_type)
        ones = torch.ones(2, 8, device=device_type)
        bias = ones[0] if norm_type == "layernorm" else None
        torch.testing.assert_close(fused(ones, ones[0], bias, 1e-5).isfinite().all().item(), True)
    except ModuleNotFoundError as error:
        if error.name != "apex":
            logger.warning("apex is installed but its %s does not run: %s", norm_type, error)
        return None
    except Exception as error:
        logger.warning("apex is installed but its %s does not run: %s", norm_type, error)
        return None
    return fused


def _bind(module, norm_type: str) -> FusedNorm:
    if norm_type == "layernorm":
        return lambda x, gain, bias, eps: module.fused_layer_norm_affine(
            x, gain, bias, gain.shape, eps
        )
    return lambda x, gain, bias, eps: module.fused_rms_norm_affine(x, gain, gain.shape, eps)
