"""The same tokens are special as in transformers, and BOS and EOS are added by tokenizer.json."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from engine.checkpoint.tokenizer_file import LONGEST_TOKEN, MAX_ADDED_TOKENS
from engine.errors import ConfigError
from server.text.load_tokenizer import load_tokenizer
from tests.support.tiny_tokenizer import WORDS, write_tokenizer

PLAIN, SPECIAL = (AddedToken("<tool>", special=s, normalized=False) for s in (False, True))
OBJECT = {"__type": "AddedToken", "content": "<x>", "lstrip": False, "rstrip": True}
BASE = {"bos_token": "<s>", "eos_token": "</s>"}
BOS, EOS, A = WORDS.index("<s>"), WORDS.index("</s>"), WORDS.index("a")


def entry(content: str, special: bool, **flags: bool) -> dict[str, Any]:
    return {"content": content, "special": special, "normalized": False, **flags}


def decoder(**tokens: Any) -> dict[str, Any]:
    return {"added_tokens_decoder": {name.removeprefix("n"): t for name, t in tokens.items()}}


# Settings in tokenizer_config.json, and special_tokens_map.json where it exists.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "decoder: special": (decoder(n4=entry("<tool>", True)), {}),
    "decoder: not special": (decoder(n4=entry("<tool>", False)), {}),
    "decoder: word": (decoder(n5=entry("<x>", True)), {}),
    "decoder: another id": (decoder(n5=entry("<tool>", True)), {}),
    "decoder: next id": (decoder(n9=entry("<new>", True)), {}),
    "decoder: next id, a word": (decoder(n9=entry("<new>", False)), {}),
    "decoder: takes the space": (decoder(n4=entry("<tool>", False, lstrip=True)), {}),
    "named": ({"pad_token": "<x>"}, {}),
    "named: an added token": ({"eos_token": "<tool>"}, {}),
    "named: not special in decoder": (
        {"eos_token": "<tool>", **decoder(n4=entry("<tool>", False))},
        {},
    ),
    "named: of one model": ({"image_token": "<x>"}, {}),
    "named: of one model, added": ({"image_token": "<tool>"}, {}),
    "extra: dict": ({"extra_special_tokens": {"tool_token": "<tool>"}}, {}),
    "extra: list": ({"extra_special_tokens": ["<tool>", "<x>"]}, {}),
    "additional": ({"additional_special_tokens": ["<tool>", "<x>"]}, {}),
    "extra before additional": (
        {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<|im_end|>"]},
        {},
    ),
    "map: additional": ({}, {"additional_special_tokens": ["<x>"]}),
    "map: eos": ({}, {"eos_token": "<|im_end|>"}),
    "map: eos as an object": ({}, {"eos_token": entry("<|im_end|>", False)}),
    "map: no eos": ({}, {"eos_token": None}),
    "map: of one model": ({}, {"image_token": "<x>"}),
    "map: not read with a decoder": (
        decoder(n2=entry("</s>", True)),
        {"eos_token": "<|im_end|>"},
    ),
    "extra before additional, empty": (
        {"extra_special_tokens": [], "additional_special_tokens": ["<x>"]},
        {},
    ),
    "extra: objects": ({"extra_special_tokens": [OBJECT]}, {}),
    "extra: dict of objects": ({"extra_special_tokens": {"tool_token": OBJECT}}, {}),
    "extra: dict with another name": ({"extra_special_tokens": {"boi": "<x>"}}, {}),
    "additional: dict": ({"additional_special_tokens": {"tool_token": "<tool>"}}, {}),
    "map: extra joins the list": (
        {"extra_special_tokens": ["<tool>"]},
        {"extra_special_tokens": ["<x>"]},
    ),
    "map: extra objects are special": ({}, {"extra_special_tokens": [{"content": "<x>"}]}),
    "map: extra object over the same token": (
        {"extra_special_tokens": [OBJECT]},
        {"extra_special_tokens": ["<x>"]},
    ),
    "map: additional joins the list": (
        {"additional_special_tokens": ["<tool>"]},
        {"extra_special_tokens": ["<x>"]},
    ),
    "map: additional after an extra": (
        {"extra_special_tokens": ["<tool>"]},
        {"additional_special_tokens": ["<x>"]},
    ),
    "map: list after a dict": (
        {"extra_special_tokens": {"tool_token": "<tool>"}},
        {"extra_special_tokens": ["<x>"]},
    ),
    "map: dict after a dict": (
        {"extra_special_tokens": {"tool_token": "<tool>"}},
        {"extra_special_tokens": {"image_token": "<x>"}},
    ),
    "eos only in the map": ({"eos_token": None}, {"eos_token": "<|im_end|>"}),
    "eos as an object": ({"eos_token": {"__type": "AddedToken", **entry("<x>", False)}}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("token", [PLAIN, SPECIAL], ids=["added", "special"])
def test_special_tokens_of_every_source_equal_transformers(
    tmp_path: Path, name: str, token: AddedToken
) -> None:
    config, mapped = CASES[name]
    files = {"special_tokens_map": mapped} if mapped else {}
    folder = write_tokenizer(tmp_path, added=[token], settings={**BASE, **config}, **files)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = [*range(len(WORDS) + 1)]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )
    assert tokenizer.encode("a  <tool> b <x> <new>") == reference.encode("a  <tool> b <x> <new>")
    for attribute in ("eos_token", "bos_token", "pad_token", "image_token", "tool_token"):
        expected = getattr(reference, attribute, None)
        assert tokenizer.special_tokens.get(attribute) == expected, attribute


def test_special_ids_are_those_that_decoding_skips(tmp_path: Path) -> None:
    """A token that either file marks is special."""
    for number, (token, special) in enumerate([(PLAIN, True), (SPECIAL, False)]):
        folder = tmp_path / str(number)
        config = decoder(n4=entry("<tool>", special))
        tokenizer = load_tokenizer(write_tokenizer(folder, added=[token], settings=config))
        assert 4 in tokenizer.special_ids
        assert tokenizer.decode([4, A]) == "a"


def test_added_tokens_decoder_with_an_unknown_token_of_a_later_id_leaves_it_out(
    tmp_path: Path,
) -> None:
    """Its id would be another one than the model was trained with."""
    config = decoder(n20=entry("<new>", True))
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, settings=config))
    assert "<new>" not in tokenizer.added_ids
    assert tokenizer.vocab_size == len(WORDS)


@pytest.mark.parametrize("wrong", [None, [], {"x": {}}, {"4": "<tool>"}, {"4": {"special": True}}])
def test_malformed_added_tokens_decoder_raises_and_names_the_file(
    tmp_path: Path, wrong: Any
) -> None:
    folder = write_tokenizer(tmp_path, settings={"added_tokens_decoder": wrong})
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: added_tokens_decoder must map"):
        load_tokenizer(folder)


def test_many_added_tokens_are_read_in_linear_time(tmp_path: Path) -> None:
    """Added one at a time, 4,000 took over a minute."""
    new = {str(len(WORDS) + i): entry(f"<extra_{i}>", i % 2 == 0) for i in range(4000)}
    begun = time.monotonic()
    folder = write_tokenizer(tmp_path, settings={"added_tokens_decoder": new})
    tokenizer = load_tokenizer(folder)
    assert time.monotonic() - begun < 20
    ids = tokenizer.encode("<extra_3998> a <extra_3999>", add_special_tokens=False)
    assert ids == [len(WORDS) + 3998, A, len(WORDS) + 3999]


# ---- BOS and EOS -------------------------------------------------------------------------------

ENDS = [("<s>", BOS), ("</s>", EOS)]
PROCESSORS: dict[str, Any] = {
    "none": None,
    "bytes": processors.ByteLevel(trim_offsets=False),
    "bos": processors.TemplateProcessing(single="<s> $A", special_tokens=ENDS),
    "eos": processors.TemplateProcessing(single="$A </s>", special_tokens=ENDS),
    "both": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ENDS),
}


@pytest.mark.parametrize("add_eos", [None, True, False])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_encode_with_flags_adds_bos_only_where_tokenizer_json_adds_nothing(
    tmp_path: Path, processor: str, add_bos: bool | None, add_eos: bool | None
) -> None:
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    config = {**BASE, **{name: flag for name, flag in flags.items() if flag is not None}}
    folder = write_tokenizer(tmp_path, post_processor=PROCESSORS[processor], settings=config)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    is_added = add_bos is True and processor in ("none", "bytes")
    for text in ("", "a b", "a b c"):
        head = [BOS] if is_added else []
        assert tokenizer.encode(text) == head + reference.encode(text)
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert plain == reference.encode(text, add_special_tokens=False)
        assert len(tokenizer.offsets(text)) == len(tokenizer.encode(text))
    assert tokenizer.encode("<s> a")[:2] != [BOS, BOS]
    assert tokenizer.begins_with_bos == (is_added or processor in ("bos", "both"))
    assert tokenizer.ends_with_eos == (processor in ("eos", "both"))


@pytest.mark.parametrize(
    ("processor", "flags", "notes"),
    [
        ("none", {}, []),
        ("bos", {"add_bos_token": True, "add_eos_token": False}, []),
        ("both", {"add_bos_token": True, "add_eos_token": True}, []),
        ("none", {"add_bos_token": True}, ["texts begin with <s>: tokenizer.json adds no token"]),
        ("eos", {"add_bos_token": True}, ["add_bos_token in tokenizer_config.json is not follow"]),
        ("bos", {"add_eos_token": True}, ["add_eos_token in tokenizer_config.json is not follow"]),
    ],
)
def test_notes_say_which_flags_are_followed(
    tmp_path: Path, processor: str, flags: dict[str, bool], notes: list[str]
) -> None:
    config = {**BASE, **flags}
    folder = write_tokenizer(tmp_path, post_processor=PROCESSORS[processor], settings=config)
    found = load_tokenizer(folder).notes
    assert len(found) == len(notes)
    assert all(note.startswith(start) for note, start in zip(found, notes, strict=True))


def test_bos_missing_in_the_vocabulary_raises(tmp_path: Path) -> None:
    config = {"bos_token": "<nowhere>", "add_bos_token": True}
    with pytest.raises(ConfigError, match="<nowhere>"):
        load_tokenizer(write_tokenizer(tmp_path, settings=config))


LONG = "x" * (LONGEST_TOKEN + 1)
MANY = {str(n): entry(f"<{n}>", True) for n in range(MAX_ADDED_TOKENS + 1)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (decoder(n9=entry(LONG, True)), "a token of 4097 characters; at most 4096"),
        ({"extra_special_tokens": [LONG]}, "a token of 4097 characters; at most 4096"),
        ({"added_tokens_decoder": MANY}, "100001 added tokens; at most 100000"),
    ],
    ids=["described", "listed", "many"],
)
def test_tokens_of_the_settings_beyond_a_limit_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    folder = write_tokenizer(tmp_path, settings=settings)
    with pytest.raises(ConfigError, match=f"{folder / 'tokenizer_config.json'} has {words}"):
        load_tokenizer(folder)
