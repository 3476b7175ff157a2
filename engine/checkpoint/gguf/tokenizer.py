"""The tokenizer of a GGUF file, as tokenizer.json and its settings.

The file names the kind of tokenizer, its tokens and merges. Of how a text is split before merging
it only names the model that did it first: see `pre_tokenizers`. Where it names none, the
architecture decides if its models all split in one way; if not, llama.cpp's default applies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.checkpoint.gguf.end_tokens import (
    CONTROL,
    KEY,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    ends_of,
    token_id,
    tokens_of,
)
from engine.checkpoint.gguf.pre_tokenizers import (
    BEGINS_WITH_BOS,
    NORMALISED,
    REFUSED,
    SPACED,
    SPLIT_OF_ARCHITECTURE,
    SPLITS,
    WHOLE_TOKENS_FIRST,
)
from engine.checkpoint.gguf.unigram import unigram
from engine.checkpoint.gguf.wordpiece import wordpiece
from engine.checkpoint.tokenizer_file import check_added_tokens, check_tokens
from engine.errors import ConfigError, listed

SPECIAL = (UNKNOWN, CONTROL)
SPACE = "▁"
# The pairs that make Llama 2's 32,000 tokens have 329,061 characters.
MAX_MERGES = 1 << 26  # characters of all pairs
SOURCE = "The GGUF file"
Settings = Mapping[str, Any]


def build_tokenizer(settings: Settings) -> Tokenizer:
    """Return the tokenizer. Raises ConfigError if it is missing, malformed or not served."""
    kind = _kind(settings)
    build = BUILDERS.get(str(kind))
    if build is None:
        served = listed(BUILDERS)
        raise ConfigError(
            f"The GGUF file has a tokenizer of kind {kind!r:.99}; served are {served}."
        )
    tokens = tokens_of(settings)
    check_tokens(tokens, SOURCE)
    try:
        tokenizer, has_bos = build(settings, tokens)
        _add_tokens(tokenizer, tokens, ends_of(settings, tokens, kinds_of(settings)).kinds)
    except ConfigError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(f"The GGUF file's tokenizer cannot be used: {error}") from error
    if kind != "bert":  # a WordPiece always has its ends
        _add_ends(tokenizer, settings, tokens, has_bos=has_bos)
    return tokenizer


def kinds_of(settings: Settings) -> list[int]:
    """Return the types of all tokens, in the order of their ids, as the file has them."""
    return _list(settings, "token_type", NORMAL)


def special_token(settings: Settings, name: str) -> str | None:
    """Return the token that `tokenizer.ggml.NAME_token_id` names, or llama.cpp's default."""
    tokens = tokens_of(settings)
    number = token_id(settings, name, len(tokens))
    return None if number is None else tokens[number]


def tokenizer_settings(settings: Settings, longest: int) -> dict[str, Any]:
    """Return tokenizer_config.json, with the chat templates."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {key: special_token(settings, name) for key, name in names.items()}
    tokens = tokens_of(settings)
    ends = ends_of(settings, tokens, kinds_of(settings))
    if token_id(settings, "eos", len(tokens)) not in ends.ids:
        named["eos_token"] = None
    # A default may be any token of the vocabulary, such as the comma of GPT-2.
    special = {
        key: token
        for key, token in named.items()
        if token is not None
        and (_has_id(settings, names[key]) or ends.kinds[tokens.index(token)] in SPECIAL)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        **special,
        **_templates(settings),
    }


def end_tokens(settings: Settings) -> list[int]:
    """Return the ids that end an answer: those that the file names, and those of known texts."""
    return ends_of(settings, tokens_of(settings), kinds_of(settings)).ids


def tokenizer_notes(settings: Settings) -> list[str]:
    """Return what a user should know of choices that the file leaves open."""
    tokens, notes = tokens_of(settings), []
    is_gpt2 = settings.get(f"{KEY}model") == "gpt2"
    pre = settings.get(f"{KEY}pre", "default")
    if is_gpt2 and pre == "default" and _split_name(settings) == pre:
        notes.append(
            f"the file does not say how its tokenizer splits texts ({KEY}pre): they are split by "
            "llama.cpp's default, which may not be the model's; convert the model again"
        )
    eos = token_id(settings, "eos", len(tokens))
    if is_gpt2 and eos is not None and not _has_id(settings, "eos"):
        notes.append(
            f"the file names no end token ({KEY}eos_token_id): as in llama.cpp, token {eos}, "
            f"{tokens[eos]!r:.40}, ends an answer"
        )
    return notes


def _has_id(settings: Settings, name: str) -> bool:
    number = settings.get(f"{KEY}{name}_token_id")
    return type(number) is int and 0 <= number < len(tokens_of(settings))


def _templates(settings: Settings) -> dict[str, Any]:
    """Return the chat template, or a list if the file has several under names."""
    key = "tokenizer.chat_template"
    texts = {
        name.removeprefix(key).removeprefix(".") or "default": text
        for name, text in settings.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(text, str)
    }
    if not texts:
        return {}
    if texts.keys() == {"default"}:
        return {"chat_template": texts["default"]}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    return {"chat_template": named}


def _list(settings: Settings, name: str, default: Any = None) -> list[Any]:
    """Return an array with an entry for each token. A missing one holds `default` only."""
    count = len(tokens_of(settings))
    found = settings.get(f"{KEY}{name}")
    if found is None and default is not None:
        return [default] * count
    if not isinstance(found, list) or len(found) < count:
        raise ConfigError(f"The GGUF file needs {count} numbers in {KEY}{name}.")
    return found[:count]


# ---- kinds -----------------------------------------------------------------------------------


def _kind(settings: Settings) -> Any:
    """Return the key in BUILDERS: Gemma 4's may also be the name of a split."""
    kind, pre = settings.get(f"{KEY}model"), settings.get(f"{KEY}pre")
    return "gemma4" if kind == "gpt2" and pre in SPACED else kind


def _split_name(settings: Settings) -> str:
    """Return the name in SPLITS. Raises ConfigError if the file has another one."""
    pre = settings.get(f"{KEY}pre", "default")
    if pre == "default":
        return SPLIT_OF_ARCHITECTURE.get(str(settings.get("general.architecture")), "default")
    if pre in REFUSED:
        raise ConfigError(
            f"The GGUF file splits texts like {pre!r} ({KEY}pre), which is not served: "
            f"{REFUSED[pre]}."
        )
    if pre not in SPLITS:
        raise ConfigError(
            f"The GGUF file splits texts like {pre!r:.99} ({KEY}pre), which is not served; served "
            f"are {', '.join(sorted(SPLITS))}."
        )
    return str(pre)


def _byte_level(settings: Settings, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return GPT-2's tokenizer, or a successor of it, and whether a text begins with BOS."""
    pre = _split_name(settings)
    given = settings.get(f"{KEY}merges") or []
    if pre == "kimi-k2" and not given:
        raise ConfigError(f"The GGUF file lacks {KEY}merges; convert the model again.")
    merges = [_pair(merge) for merge in given]
    ids = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(ids, merges, ignore_merges=pre in WHOLE_TOKENS_FIRST)
    tokenizer = Tokenizer(model)
    if pre in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(form), "isolated") for form in SPLITS[pre]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in BEGINS_WITH_BOS


def _wordpiece(settings: Settings, tokens: list[str]) -> tuple[Tokenizer, bool]:
    return wordpiece(settings, tokens), True


def _unigram(settings: Settings, tokens: list[str]) -> tuple[Tokenizer, bool]:
    return unigram(settings, tokens, _list(settings, "scores", 0.0)), False


def _pair(merge: Any) -> tuple[str, str]:
    """Return the two tokens of a merge. A space separates them; the first may begin with one."""
    left, separator, right = (merge[0] + merge[1:].replace(" ", "\0", 1)).partition("\0")
    if not separator:
        raise ConfigError(f"The GGUF file has the merge {merge!r:.99}, which names no two tokens.")
    return left, right


def _sentencepiece(settings: Settings, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return Llama 2's tokenizer: SentencePiece's BPE, with bytes for unknown characters."""
    scores = _list(settings, "scores", 0.0)
    ids = {token: number for number, token in enumerate(tokens)}
    unknown = special_token(settings, "unknown") or tokens[0]
    merges = list(_merges_of(ids, scores))
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_space = settings.get(f"{KEY}add_space_prefix", True)
    marks = normalizers.Replace(" ", SPACE)
    first = [normalizers.Prepend(SPACE)] if has_space else []
    tokenizer.normalizer = normalizers.Sequence([*first, marks])
    last = [decoders.Strip(" ", 1, 0)] if has_space else []
    plain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*plain, *last])
    return tokenizer, True


def _spaced_bpe(settings: Settings, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return Gemma 4's tokenizer: SentencePiece's marks and bytes, and merges as in GPT-2."""
    merges = [_pair(merge) for merge in settings.get(f"{KEY}merges") or []]
    ids = {token: number for number, token in enumerate(tokens)}
    unknown = special_token(settings, "unknown")
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    plain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(plain)
    return tokenizer, True


def _merges_of(ids: dict[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the merges in SentencePiece's order: those of the best token first.

    A token can be made of any two others. Of these pairs, that with the lowest ids comes first.
    """
    # Cuts at other lengths cannot give a token. Trying every cut of a long token is quadratic.
    lengths = sorted({len(token) for token in ids} - {0})
    size = 0
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        cuts = itertools.takewhile(len(token).__gt__, lengths)
        parts = ((token[:cut], token[cut:]) for cut in cuts)
        known = [pair for pair in parts if pair[0] in ids and pair[1] in ids]
        size += len(token) * len(known)
        if size > MAX_MERGES:
            raise ConfigError(
                f"The tokens of the GGUF file can be made of others in too many ways: the pairs "
                f"have over {MAX_MERGES} characters."
            )
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Keep control tokens, the unknown one and the user's own whole in a text."""
    pairs = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if token]
    special = [token for token, kind in pairs if kind in SPECIAL]
    own = [token for token, kind in pairs if kind == USER_DEFINED]
    check_added_tokens([*special, *own], SOURCE)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in own])


def _add_ends(
    tokenizer: Tokenizer, settings: Settings, tokens: list[str], *, has_bos: bool
) -> None:
    """Begin or end every text with a token, if the file says so."""
    bos, eos = special_token(settings, "bos"), special_token(settings, "eos")
    always = _kind(settings) == "gemma4"  # llama.cpp overrides the setting
    before = bos if always or settings.get(f"{KEY}add_bos_token", has_bos) else None
    has_eos = _kind(settings) == "t5"
    after = eos if settings.get(f"{KEY}add_eos_token", has_eos) else None
    around = {token: tokens.index(token) for token in (before, after) if token is not None}
    if around:
        form = " ".join(part for part in (before, "$A", after) if part is not None)
        tokenizer.post_processor = TemplateProcessing(
            single=form, special_tokens=list(around.items())
        )


BUILDERS = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _spaced_bpe,
    "bert": _wordpiece,
    "t5": _unigram,
}
