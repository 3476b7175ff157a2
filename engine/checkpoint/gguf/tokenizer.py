"""The tokenizer of a GGUF file, as tokenizer.json and its settings.

The file names the kind of tokenizer, its tokens and merges. Of how a text is split before merging
it only names the model that did it first, so that each name needs an entry in SPLITS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the pattern that splits a text; None: GPT-2's, with single digits or not.
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("default", "gpt-2", "smollm", "starcoder", "refact", "command-r")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), QWEN2),
    "tekken": TEKKEN,
}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # unless add_bos_token is there
WHOLE_TOKENS_FIRST = BEGINS_WITH_BOS  # a piece that is a token is not built from merges
NORMALISED = ("qwen2", "deepseek-r1-qwen")  # by NFC
SPACE = "▁"
KEY = "tokenizer.ggml."
Settings = Mapping[str, Any]


def build_tokenizer(settings: Settings) -> Tokenizer:
    """Return the tokenizer. Raises ConfigError if it is missing, malformed or not served."""
    kind = settings.get(f"{KEY}model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind) if kind else None
    if build is None:
        raise ConfigError(
            f"The GGUF file has a tokenizer of kind {kind!r:.99}; served are gpt2 and llama."
        )
    tokens = tokens_of(settings)
    try:
        tokenizer, has_bos = build(settings, tokens)
        _add_tokens(tokenizer, tokens, _list(settings, "token_type", len(tokens)))
    except ConfigError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(f"The GGUF file's tokenizer cannot be used: {error}") from error
    _add_ends(tokenizer, settings, tokens, has_bos=has_bos)
    return tokenizer


def tokens_of(settings: Settings) -> list[str]:
    """Return the texts of all tokens, in the order of their ids."""
    tokens = settings.get(f"{KEY}tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f"The GGUF file has no {KEY}tokens, so its text cannot be encoded.")
    return tokens


def special_token(settings: Settings, name: str) -> str | None:
    """Return the token that `tokenizer.ggml.NAME_token_id` names, if there is one."""
    tokens = tokens_of(settings)
    number = settings.get(f"{KEY}{name}_token_id")
    return tokens[number] if type(number) is int and 0 <= number < len(tokens) else None


def tokenizer_settings(settings: Settings, longest: int) -> dict[str, Any]:
    """Return tokenizer_config.json, with the chat template."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {key: special_token(settings, name) for key, name in names.items()}
    templates = _templates(settings)
    template = templates.get("default") if templates.keys() <= {"default"} else templates
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        **{key: token for key, token in special.items() if token is not None},
        **({"chat_template": template} if template else {}),
    }


def _templates(settings: Settings) -> dict[str, str]:
    """Return the chat templates by name. The one without a name is the default."""
    key = "tokenizer.chat_template"
    names = settings.get("tokenizer.chat_templates")
    keys = {"default": key}
    for name in names if isinstance(names, list) else []:
        keys[str(name)] = f"{key}.{name}"
    found = {name: settings.get(place) for name, place in keys.items()}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def end_tokens(settings: Settings) -> list[int]:
    """Return the ids that end an answer: the text's end, and the turn's where it differs."""
    given = [settings.get(f"{KEY}{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(number for number in given if type(number) is int))


def _list(settings: Settings, name: str, count: int) -> list[Any]:
    """Return an array with an entry for each token."""
    found = settings.get(f"{KEY}{name}")
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"The GGUF file needs {count} numbers in {KEY}{name}.")
    return found


# ---- kinds -----------------------------------------------------------------------------------


def _byte_level(settings: Settings, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return GPT-2's tokenizer, or a successor of it, and whether a text begins with BOS."""
    pre = settings.get(f"{KEY}pre", "default")
    if pre not in SPLITS:
        raise ConfigError(
            f"The GGUF file splits texts like {pre!r:.99} ({KEY}pre), which is not served; served "
            f"are {', '.join(sorted(SPLITS))}."
        )
    given = settings.get(f"{KEY}merges") or []
    merges = [_pair(merge) for merge in given]
    ids = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(ids, merges, ignore_merges=pre in WHOLE_TOKENS_FIRST)
    tokenizer = Tokenizer(model)
    if pre in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    pattern = SPLITS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(True)] if pre in SINGLE_DIGITS else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in BEGINS_WITH_BOS


def _pair(merge: Any) -> tuple[str, str]:
    """Return the two tokens of a merge. A space separates them; the first may begin with one."""
    left, separator, right = (merge[0] + merge[1:].replace(" ", "\0", 1)).partition("\0")
    if not separator:
        raise ConfigError(f"The GGUF file has the merge {merge!r:.99}, which names no two tokens.")
    return left, right


def _sentencepiece(settings: Settings, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return Llama 2's tokenizer: SentencePiece's BPE, with bytes for unknown characters."""
    scores = _list(settings, "scores", len(tokens))
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


def _merges_of(ids: dict[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the merges in SentencePiece's order: those of the best token first.

    A token can be made of any two others. Of these pairs, that with the lowest ids comes first.
    """
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in parts if pair[0] in ids and pair[1] in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Keep control tokens and the user's own whole in a text."""
    for kind in (CONTROL, USER_DEFINED):
        added = [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, its in zip(tokens, kinds, strict=True)
            if its == kind and token
        ]
        tokenizer.add_special_tokens(added) if kind == CONTROL else tokenizer.add_tokens(added)


def _add_ends(
    tokenizer: Tokenizer, settings: Settings, tokens: list[str], *, has_bos: bool
) -> None:
    """Begin or end every text with a token, if the file says so."""
    bos, eos = special_token(settings, "bos"), special_token(settings, "eos")
    before = bos if settings.get(f"{KEY}add_bos_token", has_bos) else None
    after = eos if settings.get(f"{KEY}add_eos_token", False) else None
    around = {token: tokens.index(token) for token in (before, after) if token is not None}
    if around:
        form = " ".join(part for part in (before, "$A", after) if part is not None)
        tokenizer.post_processor = TemplateProcessing(
            single=form, special_tokens=list(around.items())
        )
