"""CheckpointFacts: what the pages show of the files of the served model."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import read_json, read_optional
from engine.checkpoint.folder import safetensors_header, weight_files
from engine.checkpoint.gguf.header import read_header
from engine.checkpoint.gguf.parts import is_gguf
from engine.errors import ConfigError

# A part of a quantised weight, behind the module's path: codes, scales, zero points, their shape.
CODES = ("weight", "weight_packed", "qweight", "blocks")
OTHER_PARTS = (
    *("scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_shape"),
    *("weight_zero_point", "weight_g_idx", "input_scale"),
)
PART = re.compile(rf"(.+?)[._]({'|'.join((*CODES, *OTHER_PARTS))})")
# Names of safetensors' dtypes that no plain weight has.
CODE_DTYPES = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2")
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

    @functools.cached_property
    def formats(self) -> list[dict[str, Any]]:
        """The formats of the weights on disk, the largest first; none if they cannot be read."""
        try:
            files = weight_files(self._folder)
            if files and is_gguf(files[0]):
                return _sorted(_gguf_formats(files))
            headers: dict[str, Any] = {}
            for file in files:
                headers |= safetensors_header(file)
            return _sorted(_safetensors_formats(headers, read_json(self._folder / "config.json")))
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
    headers: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]
) -> list[StoredFormat]:
    """Return the formats of tensors, given as safetensors' headers describe them."""
    settings = config.get("quantization_config") or config.get("compression_config")
    settings = settings if isinstance(settings, dict) else {}
    coded: dict[str, str] = {}  # the dtype of the codes, by the module's path
    parts = {name: PART.fullmatch(name) for name in headers}
    for name, part in parts.items():
        dtype = str(headers[name]["dtype"])
        if part is not None and part[2] in CODES and dtype in CODE_DTYPES:
            coded[part[1]] = dtype
    weights: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for name, part in parts.items():
        label, weight = str(headers[name]["dtype"]), name
        if part is not None and part[1] in coded:
            weight = part[1]
            label = _label(settings, coded[weight])
        begin, end = headers[name]["data_offsets"]
        weights.setdefault(label, set()).add(weight)
        sizes[label] = sizes.get(label, 0) + end - begin
    return [StoredFormat(label, len(weights[label]), size) for label, size in sizes.items()]


def _label(settings: Mapping[str, Any], dtype: str) -> str:
    """Return the name of a quantised weight's format: the method and the width of its numbers."""
    method = str(settings.get("quant_method", ""))
    if method in ("fp8", "fbgemm_fp8", "mxfp4"):
        return method.removeprefix("fbgemm_")
    widths = "8" if dtype in (*FP8, "I8") else "/".join(_bits(settings))
    numbers = f"{'fp' if dtype in FP8 else 'int'}{widths}"
    return f"{METHODS.get(method, method)} {numbers}".strip()


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
