"""Load a checkpoint's tokenizer, and the settings of tokens in its other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from engine.checkpoint.bounded_json import read_optional
from engine.checkpoint.pointer import refuse_pointer
from engine.checkpoint.tokenizer_file import check_tokenizer_file
from engine.errors import ConfigError, clipped
from server.text.end_tokens import end_tokens
from server.text.generation_config import not_followed, sampling_defaults, suppressed_ids
from server.text.special_tokens import (
    add_bos,
    add_special_tokens,
    named_tokens,
    tokenizer_settings,
)
from server.text.tokenizer import Tokenizer, TokenSettings
from server.text.tokenizer_errors import as_tokenizer_error
from server.text.tokenizer_trial import tokenizer_problem

LOCAL_DECODERS = {"WordPiece", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


def load_tokenizer(folder: Path, *, lowercase: bool = False) -> Tokenizer:
    """Read tokenizer.json and, where present, the *config.json files and special_tokens_map.json.

    With `lowercase` letters become lower-case first, except in special tokens.
    Raises ConfigError naming the file and the problem.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json, the only supported format. transformers converts "
            "many others: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    refuse_pointer(path)
    check_tokenizer_file(path)
    try:
        backend = _read(path)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"Cannot read {path}: {error}") from error
    if lowercase:
        backend.normalizer = lowercased(backend.normalizer)
    if problem := tokenizer_problem(backend):
        raise ConfigError(f"The tokenizer in {path} {problem}.")
    return tokenizer_of(backend, folder)


def lowercased(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer:
    """Return a normalizer that makes letters lower-case before `normalizer`."""
    first = normalizers.Lowercase()
    return first if normalizer is None else normalizers.Sequence([first, normalizer])


@as_tokenizer_error
def _read(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(path))


def tokenizer_of(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    """Prepare the library's tokenizer as the files of `folder` say. Raises ConfigError."""
    backend.no_truncation()
    backend.no_padding()
    config = tokenizer_settings(folder)
    generation = read_optional(folder / "generation_config.json")
    model = read_optional(folder / "config.json")
    named = named_tokens(config)
    add_special_tokens(backend, config, folder)
    notes = [*add_bos(backend, config)]
    is_byte_level = _is_byte_level(backend, folder)
    size = _check_vocabulary(backend, folder, model)
    ends = end_tokens(generation, model, _id_of(backend, named.get("eos_token")), size, folder)
    if ends.note:
        notes = [ends.note, *notes]
    kind = config.get("tokenizer_class")
    settings = TokenSettings(
        class_name=kind if isinstance(kind, str) else None,
        special_tokens=named,
        byte_level=is_byte_level,
        eos_token_ids=ends.ids,
        bos_token_id=_bos_of(backend, named, generation, model),
        notes=[clipped(note) for note in notes],
        defaults=sampling_defaults(generation, folder),
        suppressed_ids=suppressed_ids({**model, **generation}, folder),
        response_template=config.get("response_template"),
        not_followed=not_followed(generation or model),  # as transformers chooses
    )
    return Tokenizer(backend, settings)


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    found: int | None = None if token is None else backend.token_to_id(token)
    return found


def _bos_of(
    backend: tokenizers.Tokenizer,
    named: dict[str, str],
    generation: dict[str, Any],
    model: dict[str, Any],
) -> int | None:
    """Return the id of the BOS token, by its name or as the first file has it."""
    found = _id_of(backend, named.get("bos_token"))
    for source in (generation, model):
        if found is None:
            given = source.get("bos_token_id")
            found = next(iter(given), None) if isinstance(given, list) else given
    return found


def _check_vocabulary(
    backend: tokenizers.Tokenizer, folder: Path, model: dict[str, Any]
) -> int | None:
    """Return vocab_size of config.json, and check that every token id lies below it.

    vocab_size is the number of rows of the token embedding; rows without a token are padding.
    A special token may have a larger id, as Gemma 3's image token does: a request whose prompt
    contains it is refused. Raises ConfigError for any other id that is too large.
    """
    text = model.get("text_config")
    size = (text if isinstance(text, dict) else model).get("vocab_size")
    if not isinstance(size, int):
        return None  # the engine refuses such a config.json
    added = backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    ids = backend.get_vocab(with_added_tokens=True)
    beyond = {i: t for t, i in ids.items() if i >= size and i not in special}
    if beyond:
        last = max(beyond)
        raise ConfigError(
            f"{folder / 'tokenizer.json'} has {len(beyond)} tokens beyond vocab_size = {size} "
            f"in config.json, up to {beyond[last]!r:.200} with id {last}: the two files belong to "
            "different models."
        )
    return size


def _is_byte_level(backend: tokenizers.Tokenizer, folder: Path) -> bool:
    """Return whether decoding is byte-level. Raises ConfigError if it cannot be streamed."""
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    types = [part["type"] for part in state.get("decoders", [state])]
    if "ByteLevel" in types and set(types) <= {"ByteLevel", "Fuse"}:
        return True
    if unknown := set(types) - LOCAL_DECODERS:
        raise ConfigError(
            f"{folder / 'tokenizer.json'}: decoder {types} cannot be streamed because of "
            f"{sorted(unknown)}; supported: ByteLevel alone, or any of "
            f"{sorted(LOCAL_DECODERS)}."
        )
    return False
