"""A tiktoken Encoding is read without unpickling and becomes a tokenizer.json with the same ids."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.offline.nanochat.encoding import read_encoding
from engine.offline.nanochat.tokenizer import build_tokenizer
from server.text.chat_template import TemplateError
from server.text.load_template import load_template
from server.text.load_tokenizer import load_tokenizer
from tests.support import naive_nanochat
from tests.support.nanochat_files import (
    SIZES,
    encoded,
    encoding_state,
    imported,
    pickled_encoding,
    save_tokenizer,
)

HARD = [
    *("", " ", "  lead", "trail  ", "\n\n\n", "a\r\n\r\n\n\nb \n \n\tc\r"),
    *("don'T 'S I'VE 'ſ we'LLs", "''s 'sx 'tll ... !!\n\n?", "12345 1234567", "١٢٣ Ⅻ ½"),
    *("x\u0085y \u00a0z\u2003w\u3000 \u2028a\u200bd\ufeff", "\x1c\x1d\x0b\x0c\x00 a"),
    *("e\u0301 हिन्दी ไทย 中文字符 한국어", "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 \U0010ffff"),
]
POOL = "aZt e09 '\t\n\r.,!?-_sSdDſKé中🙂\u00a0\u0085\u200d" + "self return  \n\n    "


def test_build_tokenizer_encodes_like_tiktoken(tmp_path: Path) -> None:
    state = encoding_state(700)
    save_tokenizer(tmp_path, state)
    file = tmp_path / "tokenizer.pkl"
    tokenizer = build_tokenizer(read_encoding(file), file)
    generator = random.Random(0)
    texts = [*HARD, Path(naive_nanochat.__file__).read_text()]
    texts += ["".join(generator.choices(POOL, k=generator.randint(1, 40))) for _ in range(500)]
    used = set()
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == encoded(text, state["mergeable_ranks"])
        assert tokenizer.decode(ids) == text
        used |= set(ids)
    assert max(used) > 600, "the texts should use merges late in the list"
    assert tokenizer.encode("a").ids == [tokenizer.token_to_id("<|bos|>"), ord("a")]


def test_tokenizer_token_without_merges_matches_only_a_whole_piece(tmp_path: Path) -> None:
    state = encoding_state(266)
    ranks, special = state["mergeable_ranks"], state["special_tokens"]
    ranks[b"zqx"] = 257
    state["special_tokens"] = {token: rank + 1 for token, rank in special.items()}
    save_tokenizer(tmp_path, state)
    tokenizer = build_tokenizer(read_encoding(tmp_path / "tokenizer.pkl"), tmp_path)
    assert tokenizer.encode("zqx", add_special_tokens=False).ids == [257]
    assert len(tokenizer.encode("zqxx", add_special_tokens=False).ids) == 4


def test_chat_template_matches_upstream(base: Path) -> None:
    out, _ = imported(base, base / "served")
    tokenizer, template = load_tokenizer(out), load_template(out, None)
    assert template is not None
    system = {"role": "system", "content": "S"}
    talk = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    text = template.render([system, *talk])
    assert text == (
        "<|bos|><|user_start|>S\n\nU<|user_end|><|assistant_start|>A<|assistant_end|>"
        "<|user_start|>V<|user_end|><|assistant_start|>"
    )
    assert template.render(talk, add_generation_prompt=False).endswith("V<|user_end|>")
    ids = tokenizer.encode(text, add_special_tokens=False)
    special = encoding_state(SIZES.vocab_size)["special_tokens"]
    assert ids[:2] == [special["<|bos|>"], special["<|user_start|>"]]
    assert ids.count(special["<|bos|>"]) == 1
    assert tokenizer.eos_token_ids == (special["<|assistant_end|>"], special["<|bos|>"])
    for wrong in ([*talk, system], [system], [{"role": "tool", "content": "x"}]):
        with pytest.raises(TemplateError):
            template.render(wrong)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (pickle.dumps([1]), "EMPTY_LIST"),
        (pickle.dumps({}), "not a readable pickle"),
        (pickled_encoding("gpt2"), "only names the encoding 'gpt2'"),
        (
            b"\x80\x04}r\xff\xff\xff\xff.",
            "not a readable pickle",
        ),  # would be a memo of 64 GB in the unpickler written in C
        (b"\x80\x04B\xff\xff\xff\x7f.", "not a readable pickle"),
        (b"\x80\x04Pname\n.", "PERSID"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"ctiktoken.core\nEncoding\n)R.", "REDUCE"),
        (b"ctiktoken.core\nCoreBPE\n)\x81.", r"tiktoken\.core\.CoreBPE"),
        (b"ctiktoken.core\nEncoding\n)\x81.", "not a readable pickle"),
        (b"", "not a readable pickle"),
    ],
)
def test_read_encoding_other_pickle_raises_config_error(
    code: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.pkl"
    file.write_bytes(code)
    with pytest.raises(ConfigError, match=said):
        read_encoding(file)
