"""An answer ends at each token that a file of the checkpoint names as its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from server.text.load_tokenizer import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import write_tokenizer

SIZE = 9  # the tokenizer's, whose </s> has the id 2


def read(
    folder: Path,
    *,
    generation: Any = None,
    config: Any = None,
    text: Any = None,
    token: Any = "</s>",
    **more: Any,
) -> Tokenizer:
    """Return the tokenizer of a folder whose files have these eos_token_id and eos_token."""
    files: dict[str, dict[str, Any]] = {"config": {"vocab_size": SIZE}}
    if generation is not None:
        files["generation_config"] = {"eos_token_id": generation}
    if config is not None:
        files["config"]["eos_token_id"] = config
    if text is not None:
        files["config"] = {**files["config"], "text_config": {"vocab_size": SIZE, **text}}
    settings = {} if token is None else {"eos_token": token}
    return load_tokenizer(write_tokenizer(folder, settings=settings, **files, **more))


@pytest.mark.parametrize(
    ("sources", "ids"),
    [
        ({"generation": 0, "config": 0}, (0, 2)),
        ({"generation": [1, 3], "config": 5}, (1, 3, 5, 2)),
        ({"generation": 7, "config": [5, 7]}, (7, 5, 2)),
        ({"generation": [2, 2], "config": 2}, (2,)),
        ({"config": 5}, (5, 2)),
        ({"config": 5, "text": {"eos_token_id": [6, 5]}}, (5, 6, 2)),
        ({"text": {"eos_token_id": 6}}, (6, 2)),
        ({"text": {"eos_token_id": None}}, (2,)),
        ({}, (2,)),
        ({"token": {"content": "</s>", "lstrip": False}}, (2,)),
        ({"token": {"__type": "AddedToken", "content": "<x>"}, "config": 2}, (2, 5)),
        ({"token": None}, ()),
        ({"token": None, "config": 0}, (0,)),
        ({"token": "<nowhere>", "generation": 1}, (1,)),
        ({"token": "<nowhere>"}, ()),
        ({"token": None, "special_tokens_map": {"eos_token": "<|im_end|>"}, "config": 0}, (0, 3)),
    ],
)
def test_eos_token_ids_are_the_union_of_all_files(
    tmp_path: Path, sources: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert read(tmp_path, **sources).eos_token_ids == ids


def test_note_says_which_file_names_which_end_where_they_differ(tmp_path: Path) -> None:
    (note,) = read(tmp_path, generation=0, config=[0, 5]).notes
    assert "(generation_config.json: 0; config.json: 0, 5; the tokenizer: 2)" in note
    assert read(tmp_path, generation=[0, 2], config=0).notes == []
    assert read(tmp_path).notes == []


@pytest.mark.parametrize("wrong", [SIZE, [2, 600], -1, 2.5, True, "2", [None]])
def test_id_outside_the_vocabulary_in_the_first_file_raises(tmp_path: Path, wrong: Any) -> None:
    """`min_tokens` masks the logits of all ends: an id without a logit would fail in the engine."""
    for name in ("generation", "config"):
        with pytest.raises(
            ConfigError, match=r"eos_token_id in .* a token id below vocab_size = 9"
        ):
            read(tmp_path, **{name: wrong})


@pytest.mark.parametrize("wrong", [SIZE, [5, 600], -1, "2"])
def test_id_outside_the_vocabulary_in_another_file_is_left_out_with_a_note(
    tmp_path: Path, wrong: Any
) -> None:
    tokenizer = read(tmp_path, generation=0, config=wrong)
    assert tokenizer.eos_token_ids == ((0, 5, 2) if wrong == [5, 600] else (0, 2))
    assert "config.json: " in tokenizer.notes[0]
