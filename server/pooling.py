"""How a sentence encoder's hidden states become one vector, as its sentence-transformers files say.

What those files may ask for and the engine does not do is refused when the server starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import BAD_JSON, read_json
from engine.errors import ConfigError
from engine.protocol import Pooling
from server.tokenizer import read_optional

MODES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# The switches by which sentence-transformers before 5.4 wrote `pooling_mode`.
SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}


@dataclass(frozen=True)
class PoolingConfig:
    """`longest` is the most tokens of a text the model was made for, where the files say so."""

    mode: Pooling
    normalised: bool
    longest: int | None
    lowercase: bool
    source: str  # what said so

    @classmethod
    def from_folder(cls, folder: Path, asked: int | None = None) -> PoolingConfig:
        """Reads modules.json and what it leads to; without it, does as sentence-transformers does:
        the mean, as long as it is. `asked` goes before the files' `longest`. Raises ConfigError
        naming the file and what is not served."""
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
            return cls("mean", False, longest, lowercase, "no modules.json")
        pooling, *rest = _modules(folder / "modules.json")
        mode = _mode(folder / str(pooling.get("path")) / "config.json")
        return cls(mode, bool(rest), longest, lowercase, "modules.json")

    def limit(self, own: int) -> int:
        """The most tokens of a text for a model with `own` positions."""
        return min(own, self.longest or own)

    def __str__(self) -> str:
        length = "normalised" if self.normalised else "not normalised"
        return f"{self.mode} pooling, {length} ({self.source})"


def _refuse_default_prompt(path: Path) -> None:
    if (name := read_optional(path).get("default_prompt_name")) is not None:
        raise ConfigError(
            f"{path} has default_prompt_name = {name!r}, a prompt in front of every text, which is "
            "not added here: set it to null and let clients send the prompt with the text."
        )


def _modules(path: Path) -> list[dict[str, Any]]:
    """Pooling and, where it is there, Normalize; ConfigError for any other list of modules."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        types = [str(module["type"]) for module in modules]
        place = modules[0]["path"]
    except (OSError, TypeError, LookupError, *BAD_JSON) as error:
        raise ConfigError(f"{path} is no list of modules with type and path: {error!r}") from error
    names = [t.rpartition(".")[2] if t.startswith("sentence_transformers.") else t for t in types]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{path} lists {', '.join(names)}; served are Transformer, Pooling and, if anything "
            "follows, Normalize."
        )
    if place:
        raise ConfigError(f"{path} has the Transformer in {place!r}; it must be in the folder.")
    return list(modules[1:])


def _mode(path: Path) -> Pooling:
    config = read_json(path)
    given = config.get("pooling_mode")
    if given is None:
        switches = (k for k, on in config.items() if on and k.startswith("pooling_mode_"))
        given = [SWITCHES.get(k, k.removeprefix("pooling_mode_")) for k in switches] or ["mean"]
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ConfigError(
            f"{path} asks for the pooling {' and '.join(map(str, modes))}; served is one of "
            f"{', '.join(MODES)}."
        )
    return MODES[modes[0]]
