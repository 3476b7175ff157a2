"""Convert a tiktoken Encoding to tokenizer.json and the configuration files that go with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.errors import ConfigError
from engine.offline.nanochat.encoding import Encoding

BOS, ANSWER_END = "<|bos|>", "<|assistant_end|>"
CHAT_TOKENS = (BOS, "<|user_start|>", "<|user_end|>", "<|assistant_start|>", ANSWER_END)
CHAT_TEMPLATE = """\
{{- '<|bos|>' }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user_start|>' + (system if loop.index0 == 1 else '') + message.content }}
        {{- '<|user_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant_start|>' + message.content + '<|assistant_end|>' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('nanochat has no role ' + message.role) }}
    {%- elif not loop.first or loop.last or loop.nextitem.role != 'user' %}
        {{- raise_exception('a system message goes before the first user message') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant_start|>' }}
{%- endif %}"""


def build_tokenizer(encoding: Encoding, file: Path) -> Tokenizer:
    """Return a byte-level BPE tokenizer that encodes like tiktoken and prepends BOS.

    Raises ConfigError naming `file` if the ids are not 0 to n with the special tokens last, or if
    a special token of the chat format is missing.
    """
    ranks, special = encoding.mergeable_ranks, encoding.special_tokens
    ids = sorted(ranks.values()) + sorted(special.values())
    if ids != list(range(len(ids))) or not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise ConfigError(
            f"{file}: expected ids from 0 to {len(ids) - 1}, with all 256 bytes among them and the "
            f"special tokens last; found ranks up to {max(ranks.values(), default=0)} and "
            f"special tokens {special}."
        )
    if missing := [token for token in CHAT_TOKENS if token not in special]:
        raise ConfigError(f"{file} lacks the special tokens {', '.join(missing)}.")
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(spelled(left), spelled(right)) for left, right in merges_of(ranks)]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    # As in tiktoken, a piece that is itself a token is not built from merges.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(encoding.pat_str), "isolated")
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(f"{file}: the split pattern cannot be used: {error}") from error
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token in sorted(special, key=special.__getitem__)
        ]
    )
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, special[BOS])]
    )
    return tokenizer


def merges_of(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the two tokens that each longer token is merged from, in the order of merging.

    tiktoken stores no merges: it repeatedly joins the neighbours that form the token of lowest
    rank. It builds a token inside a piece just as it would build the token alone. So encoding the
    token alone shows its last pair.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
            lowest = joined.index(min(joined))
            if joined[lowest] == len(ranks):
                break  # no merges lead to it: only a whole piece can become this token
            parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _byte_letters() -> list[str]:
    """Return GPT-2's printable character for each byte, as in ByteLevel (openai/gpt-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]


def write_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write tokenizer.json, tokenizer_config.json (with chat template), generation_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": ANSWER_END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    bos, end = tokenizer.token_to_id(BOS), tokenizer.token_to_id(ANSWER_END)
    write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": [end, bos]})


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
