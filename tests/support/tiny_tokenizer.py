"""A folder with a tokenizer of a few words, and nothing else unless a test asks for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

WORDS = ("<unk>", "<s>", "</s>", "<|im_end|>", "<tool>", "<x>", "a", "b", "c")
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def write_tokenizer(
    folder: Path,
    *,
    added: Sequence[AddedToken] = (),
    post_processor: Any = None,
    settings: dict[str, Any] | None = None,
    **files: dict[str, Any],
) -> Path:
    """Write tokenizer.json, tokenizer_config.json, and each of `files` under its name + ".json".

    `settings` are those of tokenizer_config.json. The ids are the indices in WORDS. A text is split
    at spaces.
    """
    folder.mkdir(exist_ok=True)
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(added))
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(folder / "tokenizer.json"))
    contents = {**files, "tokenizer_config": {"unk_token": "<unk>", **CLASS, **(settings or {})}}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
