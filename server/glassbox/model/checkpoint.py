"""CheckpointFacts: what the pages show of the files of the served model."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import read_optional
from engine.checkpoint.folder import read_config, safetensors_header, weight_files
from engine.checkpoint.gguf.header import read_header
from engine.checkpoint.gguf.parts import is_gguf
from engine.errors import ConfigError

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes of plain weights
FP8 = ("F8_E4M3", "F8_E5M2")
METHODS = {"awq": "AWQ", "gptq": "GPTQ"}  # as their authors write them


@dataclass(frozen=True)
class StoredFormat:
    """Weights that are stored in one format. `nbytes` includes the scales of quantised weights."""

    name: str  # such as Q4_1, BF16 or "GPTQ int4"
    tensors: int  # scales and zero points are a part of their weight
    nbytes: int


class CheckpointFacts:
    """Reads the headers of the files at the first call, which may take a second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._formats: list[dict[str, Any]] | None = None

    def formats(self, weight_parts: Collection[str]) -> list[dict[str, Any]]:
        """Return the formats of the weights on disk, the largest first; none if unreadable.

        `weight_parts` are the engine's: see Ready.
        """
        if self._formats is None:
            self._formats = self._read_formats(weight_parts)
        return self._formats

    def _read_formats(self, weight_parts: Collection[str]) -> list[dict[str, Any]]:
        try:
            files = weight_files(self._folder)
            if files and is_gguf(files[0]):
                return _sorted(_gguf_formats(files))
            headers: dict[str, Any] = {}
            for file in files:
                headers |= safetensors_header(file)
            config = read_config(self._folder)
            return _sorted(_safetensors_formats(headers, config, weight_parts))
        except (ConfigError, OSError, ValueError):  # weights of --load-format dummy, for instance
            return []

    @functools.cached_property
    def starters(self) -> list[str]:
        """Prompts that the model was made for: `starters.json` in its folder, a JSON object.

        Its field `prompts` is a list of texts. Empty without the file.
        """
        try:
            prompts = read_optional(self._folder / "starters.json").get("prompts", [])
        except ConfigError:
            return []
        return [one for one in prompts if isinstance(one, str)] if isinstance(prompts, list) else []


def _sorted(found: Iterable[StoredFormat]) -> list[dict[str, Any]]:
    return [asdict(one) for one in sorted(found, key=lambda one: (-one.nbytes, one.name))]


def _gguf_formats(files: Iterable[Path]) -> list[StoredFormat]:
    sizes: dict[str, list[int]] = {}
    for file in files:
        for tensor in read_header(file).tensors.values():
            sizes.setdefault(tensor.kind.name, []).append(tensor.nbytes)
    return [StoredFormat(name, len(each), sum(each)) for name, each in sizes.items()]


def _safetensors_formats(
    headers: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any],
    weight_parts: Collection[str],
) -> list[StoredFormat]:
    """Return the formats of tensors, given as safetensors' headers describe them."""
    settings = config.get("quantization_config") or config.get("compression_config")
    settings = settings if isinstance(settings, dict) else {}
    layers = {name: _layer_of(name, weight_parts) for name in headers}
    codes: dict[str, Mapping[str, Any]] = {}  # the largest tensor without floats, by layer
    for name, layer in layers.items():
        header = headers[name]
        if layer is None or header["dtype"] in FLOATS:
            continue
        if layer not in codes or _nbytes(header) > _nbytes(codes[layer]):
            codes[layer] = header
    weights: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for name, layer in layers.items():
        label, weight = str(headers[name]["dtype"]), name
        if layer in codes:
            weight = layer
            label = _label(settings, str(codes[layer]["dtype"]))
        weights.setdefault(label, set()).add(weight)
        sizes[label] = sizes.get(label, 0) + _nbytes(headers[name])
    return [StoredFormat(label, len(weights[label]), size) for label, size in sizes.items()]


def _layer_of(name: str, weight_parts: Collection[str]) -> str | None:
    """Return the layer whose weight a tensor can be a part of, None if it is no part."""
    suffixes = [suffix for suffix in weight_parts if name.endswith(suffix)]
    return name.removesuffix(max(suffixes, key=len)) if suffixes else None


def _nbytes(header: Mapping[str, Any]) -> int:
    begin, end = header["data_offsets"]
    return int(end - begin)


def _label(settings: Mapping[str, Any], dtype: str) -> str:
    """Return the name of a quantised weight's format: the method and the width of its numbers."""
    method = str(settings.get("quant_method", "")).removeprefix("fbgemm_")
    if dtype in FP8:
        numbers = "fp8"
    else:
        widths = "8" if dtype == "I8" else "/".join(_bits(settings))
        numbers = f"int{widths}" if widths else ""
    name = METHODS.get(method, method)
    return name if numbers in name else f"{name} {numbers}".strip()


def _bits(settings: Mapping[str, Any]) -> list[str]:
    """Return the numbers of bits that the settings of a checkpoint name."""
    if "bits" in settings:
        return [str(settings["bits"])]
    groups = settings.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and "num_bits" in weights:
            found.add(str(weights["num_bits"]))
    return sorted(found)
