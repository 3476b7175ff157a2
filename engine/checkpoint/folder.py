"""A checkpoint folder: where it is, which files it has, and whether they are intact.

Nothing here imports torch: the server reads folders too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint import bounded_json
from engine.checkpoint.bounded_json import (
    BAD_JSON,
    MAX_JSON_BYTES,
    read_any_json,
    read_json,
    read_optional,
)
from engine.checkpoint.gguf.parts import (
    is_first_part,
    is_gguf,
    is_sidecar,
    present_parts,
)
from engine.checkpoint.pointer import refuse_pointer
from engine.config import DEMO_MODEL
from engine.errors import ConfigError, clipped, listed

DEMO_FOLDERS = {  # in engine/demo
    DEMO_MODEL: "model",
    "demo-translate": "translate",
    "demo-vision": "vision",
}

# Checkpoint files that are read besides the weights, as fnmatch patterns. `pull` downloads them and
# `merge` copies them. They never include code or pickles.
CHECKPOINT_FILES = (
    "config.json",
    "hf_quant_config.json",  # quantization settings of modelopt; see `read_config`
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",  # this and the next: how pictures are prepared
    "preprocessor_config.json",
    "additional_chat_templates/*.jinja",
    "modules.json",  # this and the following: how sentence-transformers makes vectors
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*_Normalize/config.json",
    "*_Dense/config.json",
    "*_Dense/model.safetensors",
)
WEIGHTS = "model.safetensors"
NOTES = "notes.json"  # of a folder made from a GGUF file: what its user should know
MAX_NOTES = 50
IMAGE_ENCODER = "gguf_image_encoder"  # the key of config.json in such a folder that names a sidecar
WEIGHTS_INDEX = "model.safetensors.index.json"
WHERE = (
    f"Give a folder with config.json and *.safetensors, a GGUF file, {', '.join(DEMO_FOLDERS)}, or "
    "ORG/NAME on huggingface.co, such as HuggingFaceTB/SmolLM2-135M-Instruct, which is downloaded."
)


def is_hub_name(model: str) -> bool:
    """Return whether `model` has the form ORG/NAME and is no local path.

    The server looks such a name up on the hub. Raises ConfigError if the path cannot be checked.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII):
        return False
    try:
        return not Path(model).exists()
    except OSError as error:
        raise ConfigError(f"Cannot check whether {model} is a local folder: {error}") from error


def model_name(model: str) -> str:
    """Return the name of a model by its path: ORG/NAME in the hub's cache, else the last part."""
    path = Path(model)
    cached = re.search(r"/models--([^/]+)/snapshots/", path.as_posix())
    if cached:
        return cached[1].replace("--", "/")
    name = path.name or full_path(path).name
    return name.removesuffix(".gguf")


def full_path(path: Path) -> Path:
    """Return `path` as an absolute path without `~` and links. Raises ConfigError if that fails."""
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # unknown user, circular links, a NUL
        raise ConfigError(f"{path} is not a usable path: {error}") from error


def model_folder(model: str) -> Path:
    """Return the folder of `model`: for a GGUF file, one that is made from it.

    Raises ConfigError if the folder has neither config.json nor a GGUF file.
    """
    demo = Path(__file__).parents[1] / "demo"
    folder = demo / DEMO_FOLDERS[model] if model in DEMO_FOLDERS else Path(model)
    if not model or "://" in model:
        raise ConfigError(f"{model!r} is not a model name. {WHERE}")
    if is_gguf(folder) and _is_file(folder):
        return _folder_of_gguf(folder)  # by the name it was given: a link may lead to a blob
    folder = full_path(folder)
    try:
        is_folder, has_config = folder.is_dir(), (folder / "config.json").is_file()
        is_file = folder.is_file()
    except OSError as error:
        raise ConfigError(f"Cannot access the model folder: {error}") from error
    if is_file:
        raise ConfigError(f"{folder} is a file; give its folder.")
    if not is_folder:
        raise ConfigError(f"No model folder at {folder}. {WHERE}")
    if not has_config:
        if file := only_gguf(folder):
            return _folder_of_gguf(file)
        raise ConfigError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return the JSON object of config.json, with the settings of quantised weights.

    NVIDIA's Model Optimizer writes them to hf_quant_config.json, and newer versions to config.json
    too. Raises ConfigError if a file is not such JSON.
    """
    config = read_json(folder / "config.json")
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    settings = read_optional(folder / "hf_quant_config.json")
    if not settings:
        return config
    return config | {"quantization_config": {"quant_method": "modelopt", **settings}}


def only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder, or the first part of a split one; None if it has none.

    Sidecars, such as an image encoder, do not count. Raises ConfigError if there are several.
    """
    files = [file for file in _files(folder, "gguf") if is_first_part(file)]
    files = [file for file in files if not is_sidecar(file)] or files
    if len(files) > 1:
        names = listed([file.name for file in files])
        raise ConfigError(f"{folder} has several GGUF files; choose one with --gguf-file: {names}.")
    return files[0] if files else None


def image_encoder_file(folder: Path) -> Path | None:
    """Return the GGUF file of the image encoder, which belongs to the model in another one."""
    name = read_optional(folder / "config.json").get(IMAGE_ENCODER)
    if not isinstance(name, str) or Path(name).name != name:
        return None
    return folder / name


def notes_of(folder: Path) -> list[str]:
    """Return what the user of a folder made from a GGUF file should know."""
    try:
        notes = read_any_json(folder / NOTES)
    except (OSError, *BAD_JSON):
        return []
    if not isinstance(notes, list):
        return []
    others = len(notes) - MAX_NOTES
    more = [f"{others} more notes are in {folder / NOTES}"] if others > 0 else []
    return [*(clipped(str(note)) for note in notes[:MAX_NOTES]), *more]


def _folder_of_gguf(file: Path) -> Path:
    from engine.checkpoint.gguf.folder import folder_of  # imports the tokenizers library

    return folder_of(file.expanduser().absolute())


def _is_file(path: Path) -> bool:
    try:
        return path.expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*.{suffix}"))


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights: the safetensors that transformers reads, else GGUF.

    Other safetensors files in the folder are ignored: they hold the same weights for other
    programs, or an adapter. The image encoder of a GGUF model is the last file. Raises ConfigError
    if there are no weights, or if a file is missing.
    """
    entry = _weights_entry_of(folder)
    if not entry.is_file():
        if os.path.lexists(entry):  # opening a FIFO would block
            raise ConfigError(f"{entry} is not a file.")
        if file := only_gguf(folder):
            encoder = image_encoder_file(folder)
            return [*present_parts(file), *([] if encoder is None else [encoder])]
        name = entry.relative_to(folder).as_posix()
        raise ConfigError(f"{folder} has {no_weights(name, _names(folder))}")
    if not is_index(entry.name):
        return [entry]
    names = indexed_files(entry)
    # An index may name 500,000 files, and a Path for each takes seconds.
    if missing := [name for name in names if not os.path.isfile(f"{folder}/{name}")]:
        raise ConfigError(f"{entry} lists files not in {folder}: {listed(missing)}.")
    return [folder / name for name in names]


def weights_index(folder: Path) -> str | None:
    """Return the name of the index that lists the files of weights, or None without one.

    Raises as `weights_entry` does.
    """
    entry = _weights_entry_of(folder)
    return entry.relative_to(folder).as_posix() if is_index(entry.name) else None


def _weights_entry_of(folder: Path) -> Path:
    return folder / weights_entry(read_optional(folder / "config.json"), _names(folder))


def weights_entry(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the file that transformers begins with: the weights, or the index of their files.

    `names` are the files of the folder. `transformers_weights` in config.json names a file;
    otherwise it is model.safetensors, or the index if only that exists. Raises ConfigError if
    config.json names a file outside the folder or of another kind.
    """
    named = config.get("transformers_weights")
    if named is None:
        return WEIGHTS_INDEX if WEIGHTS_INDEX in names and WEIGHTS not in names else WEIGHTS
    is_weights = isinstance(named, str) and (named.endswith(".safetensors") or is_index(named))
    if is_weights and _is_inside(named):
        return str(named)
    raise ConfigError(
        f"config.json has transformers_weights = {named!r:.200}; it must name a *.safetensors file "
        "of the folder, or an index of such files."
    )


def tensor_names(folder: Path) -> Collection[str]:
    """Return the names of the tensors in the safetensors files; none if a folder has no such file.

    Raises ConfigError if the index or the file is damaged.
    """
    entry = _weights_entry_of(folder)
    if not entry.is_file():
        return ()
    if not is_index(entry.name):
        return safetensors_header(entry).keys()
    names = read_json(entry).get("weight_map")
    return names.keys() if isinstance(names, dict) else ()


def is_index(name: str) -> bool:
    """Return whether `name` is that of an index of safetensors files."""
    return name.endswith(".safetensors.index.json")


def no_weights(entry: str, names: Collection[str]) -> str:
    """Return what a folder with the files `names` lacks besides `entry`, and what to do."""
    if entry not in (WEIGHTS, WEIGHTS_INDEX):
        return f"no {entry}, which transformers_weights in config.json names."
    said = f"no {WEIGHTS}, no {WEIGHTS_INDEX} and no *.gguf, the weights that are read."
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if len(others) == 1:
        return f"{said} It has {others[0]}; if that is the whole model, rename it to {WEIGHTS}."
    if others:
        return f"{said} It has {listed(others)}; shards of a model need their index."
    return said


def _names(folder: Path) -> set[str]:
    """Return the names of the regular files in `folder`."""
    return {path.name for path in folder.iterdir() if path.is_file()}


def _is_inside(name: str) -> bool:
    """Return whether a relative path stays in its folder."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return bool(parts) and not name.startswith("/") and ".." not in parts


def indexed_files(index: Path) -> list[str]:
    """Return the files that a safetensors index names, relative to the checkpoint's folder.

    Raises ConfigError if it names none, or one outside of its folder.
    """
    mapped = read_json(index).get("weight_map")
    values = list(mapped.values()) if isinstance(mapped, dict) else []
    if not values or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{index} has no weight_map from tensor names to file names.")
    if outside := [value for value in values if not _is_inside(value)]:
        raise ConfigError(f"{index} lists files not in {index.parent}: {outside[0]!r:.200}.")
    return sorted(set(values))


def check_weight_file(file: Path) -> None:
    """Raise ConfigError if a file of weights has a damaged header."""
    if is_gguf(file):
        from engine.checkpoint.gguf.header import read_header

        refuse_pointer(file)
        read_header(file)
    else:
        safetensors_header(file)


def safetensors_header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file without `__metadata__`: name -> {dtype, shape,
    data_offsets}.

    The format is 8 bytes of header length, a JSON header and the data. Raises ConfigError if the
    file is malformed, or shorter or longer than its header says.
    """
    refuse_pointer(file)
    said = f"{file} is not a readable safetensors file: "
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_JSON_BYTES or 8 + length > size:
                raise ConfigError(f"{said}a header of {length} bytes in a file of {size} bytes.")
            header: dict[str, Any] = bounded_json.loads(stream.read(length))
        header.pop("__metadata__", None)
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items()}
    except (OSError, LookupError, TypeError, AttributeError, *BAD_JSON) as error:
        raise ConfigError(f"{said}{error!r}.") from error
    due = 8 + length + max(ends.values(), default=0)
    if size != due:
        lost = [
            name for name in sorted(ends, key=ends.__getitem__) if 8 + length + ends[name] > size
        ]
        where = f", cut off in {lost[0]}" if lost else ""
        raise ConfigError(
            f"{said}it has {size} bytes, its header says {due}{where}. Copy or download it again."
        )
    return header
