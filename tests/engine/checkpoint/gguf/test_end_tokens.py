"""llama.cpp's rule on the tokens that end an answer.

Each row was run with `xllamacpp` 2026.10.11549 and with the libllama of `llama-cpp-python` 0.3.36
(`llama_vocab_is_eog`, `llama_vocab_get_attr`). 1,600 random vocabularies were equal, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.gguf.end_tokens import ENDS, INFILL_ENDS, INFILL_MARKS, ends_of
from engine.checkpoint.gguf.tokenizer import build_tokenizer, tokenizer_notes, tokenizer_settings

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
COMMON = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "a": NORMAL, "b": NORMAL}


def settings_of(tokens: dict[str, int], kind: str = "llama", **ids: Any) -> dict[str, Any]:
    given = {"model": kind, "tokens": list(tokens), "token_type": list(tokens.values())}
    if kind == "llama":
        given |= {"scores": [0.0] * len(tokens), "bos_token_id": 1, "eos_token_id": 2}
    given |= ids
    return {f"tokenizer.ggml.{key}": v for key, v in given.items() if v is not None}


def ends(tokens: dict[str, int], **ids: Any) -> tuple[set[str], set[str]]:
    """Return the ends of COMMON and `tokens`, and the control tokens among `tokens`."""
    known = COMMON | tokens
    names = list(known)
    found = ends_of(settings_of(known, **ids), names, list(known.values()))
    assert len(found.ids) == len(set(found.ids))
    control = {name for name in tokens if found.kinds[names.index(name)] == CONTROL}
    return {names[number] for number in found.ids}, control


def all_of(kind: int, *texts: str) -> dict[str, int]:
    return dict.fromkeys(texts, kind)


INFILL = [text for texts in INFILL_ENDS.values() for text in texts]
MARKS = [text for texts in INFILL_MARKS.values() for text in texts]


@pytest.mark.parametrize("kind", [NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE])
def test_known_text_of_any_type_ends_and_becomes_control(kind: int) -> None:
    for text in sorted(ENDS - {"</s>", "<|tool_response>"}) + INFILL:
        assert ends({text: kind}) == ({"</s>", text}, {text})


def test_marks_of_infill_become_control_and_do_not_end() -> None:
    for text in MARKS:
        assert ends({text: NORMAL}) == ({"</s>"}, {text})


@pytest.mark.parametrize("text", ["<|eot|>", "<|EOT|>", "<|eos|>", "<|end_of_turn|>", "<s>x"])
def test_texts_that_look_like_ends_are_none(text: str) -> None:
    assert ends({text: CONTROL})[0] == {"</s>"}


@pytest.mark.parametrize(
    ("others", "remains"),
    [
        (("<|return|>", "<|call|>"), False),
        (("<|return|>", "<|calls|>"), False),
        (("<|call|>", "<|flush|>"), False),
        (("<|calls|>", "<|flush|>"), False),
        (("<|return|>", "<|flush|>"), True),
        (("<|call|>",), True),
        (("<|return|>",), True),
    ],
)
def test_end_of_a_message_is_taken_off_if_there_are_calls(
    others: tuple[str, ...], remains: bool
) -> None:
    found, control = ends(all_of(CONTROL, *others, "<|end|>"))
    assert found == {"</s>", *others, *(["<|end|>"] if remains else [])}
    assert ("<|end|>" in control) == remains
    named = ends(all_of(CONTROL, *others, "<|end|>"), eos_token_id=5 + len(others))[0]
    assert ("<|end|>" in named) == remains


def test_s_is_taken_off_with_tokens_of_gemma4_and_plamo() -> None:
    assert ends({"<|tool_response>": CONTROL})[0] == {"<|tool_response>"}
    assert ends({"<|plamo:eos|>": CONTROL})[0] == {"</s>"}
    assert ends({"<|plamo:eos|>": CONTROL}, eos_token_id=5)[0] == {"<|plamo:eos|>"}


@pytest.mark.parametrize(
    ("tokens", "ids", "due"),
    [
        ({"x": CONTROL}, {"eot_token_id": 5, "eom_token_id": 3}, {"</s>", "x", "a"}),
        ({"x": CONTROL}, {"eos_token_id": 9999, "eot_token_id": 9999}, {"</s>"}),
        ({"x": CONTROL}, {"eos_token_id": None, "bos_token_id": None}, {"</s>"}),
        ({"x": CONTROL}, {"eos_token_id": 5}, {"</s>", "x"}),
        ({"<|im_end|>": NORMAL}, {"eot_token_id": 3}, {"</s>", "a", "<|im_end|>"}),
        ({"<|file_sep|>": CONTROL}, {"fim_sep_token_id": 3}, {"</s>", "a"}),
        ({"<|fim_pad|>": NORMAL}, {"fim_pad_token_id": 3}, {"</s>", "a"}),
        ({"<|fim_repo|>": NORMAL}, {"fim_rep_token_id": 3}, {"</s>", "a"}),
        ({"x": CONTROL}, {"eos_token_ids": [3, 4]}, {"</s>"}),
    ],
)
def test_ids_of_the_file(tokens: dict[str, int], ids: dict[str, Any], due: set[str]) -> None:
    assert ends(tokens, **ids)[0] == due


def test_mark_of_infill_stays_as_it_is_if_a_setting_names_another() -> None:
    marks = all_of(NORMAL, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    assert ends(marks, prefix_token_id=3)[1] == {"<|fim_suffix|>", "<|fim_middle|>"}


def test_docs_name_every_text() -> None:
    page = (Path(__file__).parents[4] / "docs" / "gguf-texts.md").read_text()
    missing = [text for text in (*ENDS, *INFILL) if text.replace("|", "\\|") not in page]
    assert missing == []


def test_gpt2_without_ids_ends_at_token_11() -> None:
    tokens = all_of(NORMAL, *"abcdefghijkl,")
    settings = settings_of(tokens, "gpt2", merges=["a b"], pre="gpt-2")
    found = ends_of(settings, list(tokens), list(tokens.values()))
    assert (found.ids, found.kinds[11]) == ([11], NORMAL)
    assert "eos_token" not in tokenizer_settings(settings, 9)  # it would become a special token
    [note] = tokenizer_notes(settings)
    assert "as in llama.cpp, token 11, 'l', ends an answer" in note


def test_gpt2_with_few_tokens_has_no_default() -> None:
    tokens = all_of(NORMAL, *"abc")
    assert ends_of(settings_of(tokens, "gpt2"), list(tokens), [NORMAL] * 3).ids == []


def test_tokens_of_gpt_oss_are_shown() -> None:
    tokens = all_of(CONTROL, "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
    found = ends_of(settings_of(COMMON | tokens), list(COMMON | tokens), [CONTROL] * 9)
    assert found.kinds[5:] == [USER] * 4


def test_end_that_is_a_normal_token_stays_whole_in_a_prompt() -> None:
    """As `</s>` in Qwen's vocabulary, which is llama.cpp's end of an answer there, too."""
    settings = settings_of(COMMON | {"<end_of_turn>": NORMAL}, add_space_prefix=False)
    tokenizer = build_tokenizer(settings)
    assert tokenizer.encode("a<end_of_turn>b", add_special_tokens=False).ids == [3, 5, 4]
    assert tokenizer.decode([3, 5, 4]) == "ab"
    assert tokenizer.encode("<unk>", add_special_tokens=False).ids == [0]
