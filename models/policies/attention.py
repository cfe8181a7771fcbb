"""Attention backends of diffusers and transformers: which ones change results, and the requirements of each.

Exact backends compute the same attention and differ only in rounding, as two devices do; fingerprints leave them out.
Approximate ones quantize queries, keys or values: they give different images, and fingerprints name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowmill.configs.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Properties of one backend."""

    exact: bool = True
    """Differs from torch's own attention by rounding only."""
    trains: bool = True
    """Has a backward pass."""
    masks: bool = True
    """Takes an attention mask."""
    half: bool = False
    """Computes in bfloat16 and float16 only."""
    devices: tuple[str, ...] = ()
    """Kinds of devices that it trains on; empty: any."""


_CUDA = ("cuda",)
_FLASH = Backend(masks=False, half=True, devices=_CUDA)
_VARLEN = Backend(half=True, devices=_CUDA)
_SAGE = Backend(exact=False, trains=False, masks=False, half=True, devices=_CUDA)
BACKENDS: Mapping[str, Backend] = {
    **dict.fromkeys(("native", "_native_math"), Backend()),
    # Flex attention has no backward pass on CPUs.
    "flex": Backend(devices=("cuda", "xpu")),
    **dict.fromkeys(("_native_efficient", "xformers"), Backend(devices=_CUDA)),
    "_native_cudnn": Backend(half=True, devices=_CUDA),
    "_native_flash": Backend(masks=False, half=True),
    "_native_npu": Backend(half=True, devices=("npu",)),
    "_native_xla": Backend(masks=False, devices=("xla",)),
    **dict.fromkeys("flash flash_hub flash_4_hub _flash_3 _flash_3_hub aiter_fa2_hub".split(), _FLASH),
    **dict.fromkeys("flash_varlen flash_varlen_hub _flash_varlen_3 _flash_3_varlen_hub".split(), _VARLEN),
    **dict.fromkeys(
        (
            "sage sage_hub sage_blackwell_hub _sage_qk_int8_pv_fp8_cuda _sage_qk_int8_pv_fp8_cuda_sm90 "
            "_sage_qk_int8_pv_fp16_cuda _sage_qk_int8_pv_fp16_triton"
        ).split(),
        _SAGE,
    ),
    "sage_varlen": Backend(exact=False, trains=False, half=True, devices=_CUDA),
}
#: Implementations of transformers, for language models; ``language_classes`` finds which of them a class has.
LANGUAGE_BACKENDS: Mapping[str, Backend] = {
    **dict.fromkeys(("sdpa", "eager"), Backend()),
    "flex_attention": Backend(devices=("cuda", "xpu")),
    **dict.fromkeys(("flash_attention_2", "flash_attention_3", "flash_attention_4"), _VARLEN),
}
#: Families whose blocks call torch's attention directly, so that a backend would have no effect.
FIXED = frozenset({"sd15", "sdxl", "sd3", "sana", "qwen_image21", "cogvideox"})
#: Families whose tokens diffusers cannot split over ranks.
UNSPLIT = frozenset(
    (
        "sd15 sdxl sd3 z_image sana sana_video hunyuan_video15 hunyuan_video15_i2v qwen_image21 flux3 ltx2 ltx2_i2v "
        "cogvideox"
    ).split()
)
#: Families whose text is padded, and masked in attention where texts differ in length.
MASKED = frozenset(
    (
        "qwen_image qwen_image_edit qwen_image_edit_plus z_image sana_video hunyuan_video15 hunyuan_video15_i2v ltx2 "
        "ltx2_i2v"
    ).split()
)


def attention_identity(name: str | None) -> str:
    """Return a backend's entry in a fingerprint: 'exact', or the name of one that may be inexact."""
    if name is None:
        return "exact"
    backend = BACKENDS.get(name)
    return "exact" if backend is not None and backend.exact else name


def wrong_device(backend: Backend, device: str) -> str | None:
    """Return the reason why a backend does not train on a device, if it does not."""
    kind = device.partition(":")[0]
    if not backend.devices or kind in backend.devices:
        return None
    return f"it trains on {' and '.join(backend.devices).upper()} devices only, and the run's is '{kind}'"


def set_attention(module: Any, backend: str) -> None:
    """Set the attention backend of one model only; diffusers would set it for every model of the process. Raises
    ConfigError if this machine lacks the backend's package."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    before, _ = Registry.get_active_backend()
    try:
        module.set_attention_backend(backend)
    except RuntimeError as error:
        raise ConfigError(
            f"model.attention is '{backend}', but diffusers cannot use it on this machine: {first_line(error)} Install "
            "that package, or remove model.attention."
        ) from None
    finally:
        Registry.set_active_backend(before)
