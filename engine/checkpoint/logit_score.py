"""LogitScoreConfig: two tokens of a decoder's vocabulary whose logits score a pair of texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.sentence_modules import folder_of_kind
from engine.config import Pooling
from engine.errors import ConfigError

MODULES, KIND = "modules.json", "LogitScore"
LOGIT_SCORE: Pooling = "logit_score"
YES, NO = "yes", "no"  # as sentence-transformers scores a folder without modules.json


@dataclass(frozen=True)
class LogitScoreConfig:
    """The score is the logit of `true_token` minus that of `false_token`, if there is one."""

    true_token: int
    false_token: int | None


def read_logit_score(folder: Path, pooling: Pooling | None) -> LogitScoreConfig | None:
    """Return the tokens that modules.json names, or those of --pooling logit_score, or None.

    Raises ConfigError naming the file and the problem.
    """
    place = folder_of_kind(folder, MODULES, KIND)
    if place is None:
        return _of_vocabulary(folder) if pooling == LOGIT_SCORE else None
    path = place / "config.json"
    config = read_json(path)
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if type(true) is not int or (false is not None and type(false) is not int):
        raise ConfigError(
            f"{path} has true_token_id = {true!r:.40} and false_token_id = {false!r:.40}; they "
            "must be token ids, the second one perhaps null."
        )
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise ConfigError(f"{path} has another module_input_name than causal_logits.")
    return LogitScoreConfig(true, false)


def _of_vocabulary(folder: Path) -> LogitScoreConfig:
    path = folder / "tokenizer.json"
    file = read_json(path)
    vocabulary: Any = file.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    for token in file.get("added_tokens", []):
        vocabulary[token["content"]] = token["id"]
    missing = [word for word in (YES, NO) if word not in vocabulary]
    if missing:
        raise ConfigError(f"{path} has no token {missing[0]!r}, which --pooling logit_score needs.")
    return LogitScoreConfig(vocabulary[YES], vocabulary[NO])
