"""Texts and how llama.cpp splits them, for each tokenizer.ggml.pre: tests/data/gguf_splits.json.

`python -m tests.support.gguf_splits` writes that file with `llama-cpp-python==0.3.36` and `gguf`.
A vocabulary that holds all parts of a text, and all merges of two, gives one token for each piece.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path

ANSWERS = Path(__file__).parents[1] / "data" / "gguf_splits.json"
TEXTS = (
    "I'll say 'Tis HE'S o'clock",
    "Don't 12345!? a=b <x> ~5%",
    "1234567  12 3 4567",
    "12345abc 1,234,567.8",
    "a  b   c \n\n d\r\n  e  ",
    "\t\tif (x):\n    y += 1",
    "foo_bar (a+b);\n x//y/\n/z",
    "CamelCase HTTPServer iOS",
    "Hello World's  end.\n\n\n",
    "naïve café Straße",
    "na\u0308ive e\u0301a",
    "中文字。“是”かな",
    "2024年12月, 3日!",
    "한국어 ㄱㄴ 테스트!",
    "ㄅㄆ、…—！ab",
    "Привет Мир, ΔΩ",
    "ไทย ລາວ မြန်",
    "हिन्दी में १२३",
    "« ok » €5 £6 © ™",
    "🙂👍🏽 ok 🇩🇪",
    "`code` |x| {y} $z #t",
    "IMGIMGABZ <sentinel:7>",
    "x\u00a0y\u3000z\u2003w",
    "a b c d e/f/ g",
    "'sabc evi'nin 're've'll'd",
    "(one, two) [3] -4 +5",
    "ABCdefGHI123jkl",
    " leading  trailing ",
    " " * 21 + "x" + " " * 5,
    "ÉCOLE École ÀÉa éÀ",
)


def write_vocabulary(path: Path, text: str) -> None:
    """Write a GGUF file without tensors, whose tokens are all parts of the text."""
    import gguf

    from server.text.tokenizer import BYTE_ALPHABET

    alphabet = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    whole = "".join(alphabet[byte] for byte in text.encode())
    parts = {whole[a:b] for a in range(len(whole)) for b in range(a + 1, len(whole) + 1)}
    tokens = sorted(parts | set(alphabet.values()), key=lambda part: (len(part), part))
    merges = [f"{part[:cut]} {part[cut:]}" for part in tokens for cut in range(1, len(part))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lengths_by_llama_cpp(file: Path, pre: str, text: str) -> list[int]:
    """Return the characters of each piece of the text."""
    import llama_cpp as lib

    override = (lib.llama_model_kv_override * 2)()
    override[0].key, override[0].tag = b"tokenizer.ggml.pre", 3
    override[0].value.val_str = pre.encode()
    params = lib.llama_model_default_params()
    params.vocab_only, params.kv_overrides = True, override
    model = lib.llama_model_load_from_file(str(file).encode(), params)
    vocab, raw = lib.llama_model_get_vocab(model), text.encode()
    tokens = (ctypes.c_int32 * 512)()
    count = lib.llama_tokenize(vocab, raw, len(raw), tokens, 512, False, False)
    buffer = ctypes.create_string_buffer(512)
    pieces = []
    for token in tokens[:count]:
        size = lib.llama_token_to_piece(vocab, token, buffer, 512, 0, True)
        pieces.append(buffer.raw[:size].decode())
    lib.llama_model_free(model)
    assert "".join(pieces) == text, (pre, text, pieces)
    return [len(piece) for piece in pieces]


def main() -> None:
    from engine.checkpoint.gguf.pre_tokenizers import NAMED

    answers: dict[str, list[str]] = {names.split()[0]: [] for names, _ in NAMED}
    with tempfile.TemporaryDirectory() as folder:
        for text in TEXTS:
            write_vocabulary(file := Path(folder, "vocabulary.gguf"), text)
            for names, _ in NAMED:
                first, *others = names.split()
                found = lengths_by_llama_cpp(file, first, text)
                for name in others:
                    assert lengths_by_llama_cpp(file, name, text) == found, (name, text)
                answers[first].append(" ".join(map(str, found)))
    lines = [f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
