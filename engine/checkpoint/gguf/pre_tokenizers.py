"""How texts are split before merging, by the names that llama.cpp knows (`tokenizer.ggml.pre`).

llama.cpp writes some splits without the difference of upper and lower case, or with other ends of
numbers, because its regular expressions lack them. Here they are as in the models' tokenizer.json.
"""

from __future__ import annotations

from engine.checkpoint.gguf.splits import (
    BLOOM,
    CJK,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    HAN_V2,
    KOREAN_AND_MARKS,
)

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS, MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = "|".join((ENDINGS, WORDS, r"\p{N}{1,3}", MARKS, SPACES))
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(endings: str, numbers: str, marks: str, upper: str = UPPER, lower: str = LOWER) -> str:
    """Return a split of words where a lower letter is followed by an upper one."""
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}[{upper}]*[{lower}]+{endings}|{first}[{upper}]+[{lower}]*{endings}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[{marks}]*|{SPACES}"


TEKKEN = _cased("", r"\p{N}", r"\r\n/")
GPT4O = _cased(f"{ENDINGS}?", r"\p{N}{1,3}", r"\r\n/")
NOT_HAN = r"&&[^\p{Han}]"
KIMI = r"\p{Han}+|" + _cased(
    f"{ENDINGS}?", r"\p{N}{1,3}", r"\r\n", f"{UPPER}{NOT_HAN}", f"{LOWER}{NOT_HAN}"
)
LAST_SPACES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
JAIS2 = LLAMA3.replace(r"\s+(?!\S)|\s+", rf"{LAST_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}")
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
EXAONE_MOE = (
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}")
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)
SPARK = (
    *DEEPSEEK_V3[:2],
    DEEPSEEK_V3[2].replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"),
    r"\p{N}",
)
# The names, of one tokenizer each, and the patterns that split a text, one after the other.
NAMED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", DEFAULT),
    (
        "gpt-2 exaone4 olmo modern-bert phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat "
        "a.x-4.0 mellum mpt jais trillion granite-docling jina-v1-en jina-v2-code roberta-bpe",
        (GPT2,),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        (r"\p{N}", GPT2),
    ),
    (
        "llama-bpe llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0 jina-v5-nano dbrx "
        "smaug-bpe glm4 glm5 chatglm-bpe",
        (LLAMA3,),
    ),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez kormo f2llmv2 hunyuan solar-open grok-2",
        (QWEN2,),
    ),
    ("qwen35", (QWEN35,)),
    ("tekken", (TEKKEN,)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (GPT4O,)),
    ("granite-embed-multi-97m", (GPT4O,)),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    ("kimi-k2", (KIMI,)),
    ("deepseek-llm", DEEPSEEK_V2),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{HAN_V2}]+", r"\p{N}")),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", DEEPSEEK_V3),
    ("spark2_5", SPARK),
    ("youtu", (KOREAN_AND_MARKS, _cased(f"{ENDINGS}?", r"\p{N}", r"\r\n/"))),
    ("falcon", (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")),
    ("bloom poro-chat gpt3-finnish", (BLOOM,)),
    ("viking", (BLOOM, r"\p{N}")),
    ("jais-2", (JAIS2,)),
    ("chameleon", CHAMELEON),
    ("superbpe", (r"\p{N}+", r"\d{1,3}(?=(?:\d{3})*(?!\d))")),
    ("bailingmoe bailingmoe2 llada-moe", (BAILING,)),
    ("seed-coder", (QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    ("ufakzeka", (QWEN2.removeprefix(f"{ENDINGS}|"),)),
    ("afmoe", (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", f"[{CJK}]+", DEEPSEEK_V3[2])),
    ("laguna", (r"[^\n]+|\n+", QWEN2)),
    ("exaone-moe", (EXAONE_MOE,)),
    ("minicpm5", (r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+"))),
)
SPLITS = {name: patterns for names, patterns in NAMED for name in names.split()}
# Unless add_bos_token is there.
LIKE_LLAMA3 = (
    *("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
    "jina-v5-nano",
)
BEGINS_WITH_BOS = (*LIKE_LLAMA3, "tekken", "chameleon")
# A piece that is a token is not built from merges.
WHOLE_TOKENS_FIRST = (
    *(*LIKE_LLAMA3, "tekken", "minicpm5", "youtu", "glm4", "glm5", "granite-embed-multi-97m"),
)
SPACED = ("gemma4", "granite-embed-multi-311m")  # merged as Gemma 4's, without a split
NORMALISED = ("qwen2", "deepseek-r1-qwen", "qwen35")  # by NFC
# llama.cpp knows these too.
REFUSED = {
    "whitespace": "its tokens are no bytes, and it drops white space",
    "sarvam-moe": "its models are not served",
}
SPLIT_OF_ARCHITECTURE = {
    "gpt2": "gpt-2",
    "gpt-oss": "gpt-4o",
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl"), "qwen2"),
    "qwen3next": "qwen2",
    **dict.fromkeys(("qwen35", "qwen35moe"), "qwen35"),
}
