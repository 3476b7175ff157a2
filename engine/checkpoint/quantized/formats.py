"""The storage formats that are served, by their `quant_method` in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.quantized.awq import AWQ
from engine.checkpoint.quantized.bitsandbytes import BitsAndBytes
from engine.checkpoint.quantized.compressed_tensors import CompressedTensors
from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.fp8 import FP8
from engine.checkpoint.quantized.gptq import GPTQ
from engine.checkpoint.quantized.modelopt import ModelOpt
from engine.checkpoint.quantized.mxfp4 import MXFP4
from engine.checkpoint.quantized.torchao import TorchAO
from engine.errors import ConfigError

KEYS = ("quantization_config", "compression_config")  # the second is older
STORAGE_FORMATS: dict[str, type[StorageFormat]] = {
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": FP8,
    "fp8": FP8,
    "gptq": GPTQ,
    "modelopt": ModelOpt,
    "mxfp4": MXFP4,
    "torchao": TorchAO,
}


def quantization_key(config: Mapping[str, Any]) -> str | None:
    """Return the key of config.json with the settings of quantised weights, None without any."""
    return next((key for key in KEYS if config.get(key)), None)


def storage_format(config: Mapping[str, Any]) -> StorageFormat | None:
    """Return the format that config.json names; None if the weights are not quantised.

    Raises ConfigError for a format, or a variant of it, that is not served.
    """
    key = quantization_key(config)
    if key is None:
        return None
    settings = config[key]
    name = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(name, str) or name not in STORAGE_FORMATS:
        raise ConfigError(
            f"config.json has {key} ({name!r:.99}): quantised weights of this kind are not served; "
            f"supported: {', '.join(STORAGE_FORMATS)}. Use the original checkpoint, or one of "
            "these."
        )
    return STORAGE_FORMATS[name].of(settings)
