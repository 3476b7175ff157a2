"""The special tokens of a checkpoint, by the rules of transformers 5.24 for its files.

Three files name them: tokenizer.json, tokenizer_config.json and special_tokens_map.json. The last
one is read, and takes precedence, only if tokenizer_config.json has no `added_tokens_decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from engine.checkpoint.bounded_json import read_optional
from engine.checkpoint.tokenizer_file import check_added_tokens
from engine.errors import ConfigError, listed

SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"  # the new name and the old
OF_MODEL = "model_specific_special_tokens"  # by name
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an AddedToken


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with the tokens of special_tokens_map.json.

    Tokens without a name are in the list EXTRA. A dict there has names, and moves to OF_MODEL.
    """
    settings = read_optional(folder / "tokenizer_config.json")
    if not settings.get(EXTRA):
        _rename_additional(settings)
    _name_extra_tokens(settings)
    if "added_tokens_decoder" not in settings:
        for name, value in read_optional(folder / "special_tokens_map.json").items():
            if name == EXTRA and isinstance(value, list):
                settings[EXTRA] = _merged(settings.get(EXTRA), value)
            elif name in (EXTRA, ADDITIONAL) or name.endswith("_token"):
                settings[name] = value
        _name_extra_tokens(settings)
    if EXTRA not in settings:
        _rename_additional(settings)
        _name_extra_tokens(settings)
    return settings


def _rename_additional(settings: dict[str, Any]) -> None:
    if ADDITIONAL in settings:
        settings[EXTRA] = settings.pop(ADDITIONAL)


def _name_extra_tokens(settings: dict[str, Any]) -> None:
    if isinstance(settings.get(EXTRA), dict):
        earlier = settings.get(OF_MODEL)
        named = earlier if isinstance(earlier, dict) else {}
        settings[OF_MODEL] = {**named, **settings.pop(EXTRA)}


def _merged(earlier: Any, more: list[Any]) -> list[Any]:
    """Return a list of tokens with those of special_tokens_map.json, where objects are special."""
    merged = list(earlier) if isinstance(earlier, list) else []
    for token in more:
        found = {**token, "special": True} if isinstance(token, dict) else token
        if found not in merged:
            merged.append(found)
    return merged


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name: bos_token, eos_token, …, and those of one model only.

    The latter, such as image_token, are in `settings` or in its OF_MODEL.
    """
    named = {name: _content(settings.get(name)) for name in SPECIAL_TOKENS}
    of_model = settings.get(OF_MODEL)
    for name, value in settings.items():
        if name.endswith("_token") and isinstance(value, str):
            named[name] = value
    for name, value in of_model.items() if isinstance(of_model, dict) else ():
        named[name] = _content(value)
    return {name: token for name, token in named.items() if token is not None}


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens of a folder by name, which chat templates read as variables."""
    return named_tokens(tokenizer_settings(folder))


def add_special_tokens(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path
) -> None:
    """Mark tokens of `backend` as special where only the settings do.

    A token in `added_tokens_decoder` gets the flags there, but stays special if tokenizer.json says
    so. Tokens with a name are special. Those in a list are so unless they are added tokens already.
    Texts that are not in the vocabulary are left out, except for those of `added_tokens_decoder`
    whose id is the next one. Raises ConfigError if `added_tokens_decoder` is malformed, or if the
    settings hold too many tokens.
    """
    added = _added(backend)
    # Tokens are added together, because the library builds its search for all of them each time.
    changed: dict[str, AddedToken] = {}
    size = backend.get_vocab_size()
    described = _added_tokens(settings, folder)
    listed_tokens = list(_listed_tokens(settings))
    everything = [*(token for _, token in described), *listed_tokens]
    source = str(folder / "tokenizer_config.json")
    check_added_tokens([token.content for token in everything], source)
    for number, token in described:
        text = token.content
        is_known = text in changed or backend.token_to_id(text) is not None
        if is_known or number == size:
            before = changed.get(text) or added.get(text)
            was_special = before is not None and before.special
            changed[text] = _with_flags(token, special=was_special or token.special)
            size += not is_known
    backend.add_tokens(list(changed.values()))
    added |= changed
    named: dict[str, AddedToken] = {}
    for text in named_tokens(settings).values():
        token = added.get(text, AddedToken(text, normalized=False))
        if backend.token_to_id(text) is not None and not token.special:
            named[text] = _with_flags(token, special=True)
    backend.add_special_tokens(list(named.values()))
    added |= named
    listed: dict[str, AddedToken] = {}
    for token in listed_tokens:
        if backend.token_to_id(token.content) is not None and token.content not in added:
            listed[token.content] = token  # a later one has its flags
    backend.add_tokens(list(listed.values()))


def _added(backend: tokenizers.Tokenizer) -> dict[str, AddedToken]:
    return {token.content: token for token in backend.get_added_tokens_decoder().values()}


def _with_flags(token: AddedToken, **flags: bool) -> AddedToken:
    """Return a copy of `token` with some flags changed."""
    return AddedToken(token.content, **{name: getattr(token, name) for name in FLAGS} | flags)


def _content(token: Any) -> str | None:
    """Return the text of a token, which is a text itself or an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_tokens(settings: Mapping[str, Any], folder: Path) -> list[tuple[int, AddedToken]]:
    """Return the tokens of `added_tokens_decoder` by id. Raises ConfigError."""
    given = settings.get("added_tokens_decoder", {})
    try:
        found = [(int(number), _token(entry)) for number, entry in given.items()]
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map token ids to "
            f"objects with content and flags ({error})."
        ) from error
    return sorted(found, key=lambda pair: pair[0])


def _token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry[name]) for name in FLAGS if name in entry}
    content = entry.get("content")
    if not isinstance(content, str):
        raise TypeError(f"content is {content!r:.40}")
    return AddedToken(content, **{"special": False} | flags)


def _listed_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens of the list EXTRA. A text is a special token; an object says what it is."""
    given = settings.get(EXTRA)
    for entry in given if isinstance(given, list) else ():
        if isinstance(entry, str):
            yield AddedToken(entry, special=True)
        elif isinstance(entry, dict) and isinstance(entry.get("content"), str):
            yield _token(entry)


def add_bos(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> Iterator[str]:
    """Begin texts with BOS if the settings say so, and tokenizer.json adds no token to a text.

    Yields notes on `add_bos_token` and `add_eos_token`: EOS is never added by a setting, because it
    would end the prompt that the model continues. transformers drops both settings if there is a
    tokenizer.json; older fast tokenizers had the first in place of a post-processor. Raises
    ConfigError if the vocabulary lacks BOS.
    """
    named = named_tokens(settings)
    bos, eos = named.get("bos_token"), named.get("eos_token")
    added = backend.encode("").tokens
    if settings.get("add_eos_token") is True and eos is not None and eos not in added[-1:]:
        yield f"add_eos_token in tokenizer_config.json is not followed: no text ends with {eos}"
    begins = bos is not None and added[:1] == [bos]
    if settings.get("add_bos_token") is not True or bos is None or begins:
        return
    if added:
        yield (
            "add_bos_token in tokenizer_config.json is not followed: tokenizer.json adds "
            f"{listed(dict.fromkeys(added))}"
        )
        return
    number = backend.token_to_id(bos)
    if number is None:
        raise ConfigError(
            f"tokenizer_config.json adds bos_token {bos!r:.200}, which tokenizer.json lacks."
        )
    begin = processors.TemplateProcessing(
        single=[bos, "$A"], pair=None, special_tokens=[(bos, number)]
    )
    own = backend.post_processor
    backend.post_processor = begin if own is None else processors.Sequence([own, begin])
    yield f"texts begin with {bos}: tokenizer.json adds no token, and add_bos_token is true"
