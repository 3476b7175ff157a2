"""Read from a checkpoint's sentence-transformers files how to pool hidden states into one vector.

Settings that the engine does not support are refused when the server starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import BAD_JSON, read_any_json, read_json, read_optional
from engine.errors import ConfigError, listed
from engine.protocol.embed import Pooling
from server.text.pooling import PoolingConfig

MODES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# The boolean keys that sentence-transformers before 5.4 wrote in place of `pooling_mode`.
SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}


def load_pooling(folder: Path, asked: int | None = None) -> PoolingConfig:
    """Read modules.json and the files that it names.

    Without modules.json the pooling is the mean without normalisation, as in
    sentence-transformers. A maximum length given by the caller overrides the files'. Raises
    ConfigError naming the file and the unsupported setting.
    """
    texts = read_optional(folder / "sentence_bert_config.json")
    longest = texts.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(
            f"{folder / 'sentence_bert_config.json'} has max_seq_length = {longest!r}; it must "
            "be a whole number above 0."
        )
    longest, lowercase = asked or longest, bool(texts.get("do_lower_case"))
    _refuse_default_prompt(folder / "config_sentence_transformers.json")
    if not (folder / "modules.json").is_file():
        return PoolingConfig("mean", False, longest, lowercase, "no modules.json")
    pooling, *rest = _modules(folder / "modules.json")
    mode = _mode(folder / str(pooling.get("path")) / "config.json")
    return PoolingConfig(mode, bool(rest), longest, lowercase, "modules.json")


def _refuse_default_prompt(path: Path) -> None:
    if (name := read_optional(path).get("default_prompt_name")) is not None:
        raise ConfigError(
            f"{path} has default_prompt_name = {name!r}, but default prompts are not supported: "
            "set it to null and let clients put the prompt in front of each text."
        )


def _modules(path: Path) -> list[dict[str, Any]]:
    """Return the entries of Pooling and, if present, Normalize.

    Raises ConfigError for any other list of modules.
    """
    try:
        modules = read_any_json(path)
        types = [str(module["type"]) for module in modules]
        place = modules[0]["path"]
    except (OSError, TypeError, LookupError, *BAD_JSON) as error:
        raise ConfigError(
            f"{path} must be a list of modules with type and path: {error!r}"
        ) from error
    names = [t.rpartition(".")[2] if t.startswith("sentence_transformers.") else t for t in types]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{path} lists {listed(names)}; supported: Transformer, Pooling and, optionally, "
            "Normalize."
        )
    if place:
        raise ConfigError(
            f'{path} gives Transformer the path {place!r}; supported: "", the model\'s own folder.'
        )
    return list(modules[1:])


def _mode(path: Path) -> Pooling:
    """Return the pooling mode. Raises ConfigError unless it is a single supported one."""
    config = read_json(path)
    given = config.get("pooling_mode")
    if given is None:
        switches = (k for k, on in config.items() if on and k.startswith("pooling_mode_"))
        given = [SWITCHES.get(k, k.removeprefix("pooling_mode_")) for k in switches] or ["mean"]
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ConfigError(
            f"{path} sets the pooling {' and '.join(map(str, modes))}; supported: one of "
            f"{', '.join(MODES)}."
        )
    return MODES[modes[0]]
