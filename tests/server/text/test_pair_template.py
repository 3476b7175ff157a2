"""How two texts are joined and cut, against the tokenizers library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import BertProcessing, RobertaProcessing, TemplateProcessing

from engine.errors import ConfigError
from server.text.load_tokenizer import load_tokenizer
from server.text.pair_template import PairTemplate, longest_first, read_pair_template
from server.text.tokenizer import Tokenizer
from tests.server.conftest import BOS, EOS, byte_tokenizer

ENDS = [("<s>", BOS), ("</s>", EOS)]
TYPED = {"model_input_names": ["input_ids", "token_type_ids"]}


def template(pair: str) -> TemplateProcessing:
    return TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ENDS)


PROCESSORS = {
    "bert": BertProcessing(ENDS[1], ENDS[0]),
    "roberta": RobertaProcessing(ENDS[1], ENDS[0]),
    "template": template("<s>:0 $A:0 </s>:1 </s>:1 $B:1"),
    "none": None,
    "only between": template("$A </s> $B"),
}


def loaded(folder: Path, processor: Any, **config: Any) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    folder.mkdir(exist_ok=True)
    backend = byte_tokenizer()
    if processor is not None:
        backend.post_processor = processor
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder), backend


def read(folder: Path, processor: Any, **config: Any) -> PairTemplate:
    return read_pair_template(loaded(folder, processor, **config)[0], folder)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_pair_equals_that_of_the_library_also_when_cut(
    tmp_path: Path, name: str, side: str
) -> None:
    tokenizer, backend = loaded(tmp_path, PROCESSORS[name], **TYPED)
    pair = read_pair_template(tokenizer, tmp_path)
    chosen = random.Random(0)
    for _ in range(200):
        first, second = ("".join(chosen.choices("abcd", k=chosen.randrange(20))) for _ in range(2))
        most = chosen.randrange(6, 50)
        backend.enable_truncation(most, strategy="longest_first", direction=side)
        due = backend.encode(first, second)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
        one, other = pair.fit(*ids, most, keep_end=side == "left")
        assert pair.join(one, other) == due.ids
        start = pair.second(one)
        types = [int(0 < start <= place) for place in range(len(due.ids))]
        if start:
            assert types == due.type_ids
        else:
            assert 1 not in due.type_ids or not first


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [((30, 30), (6, 7)), ((30, 3), (10, 3)), ((3, 30), (3, 10)), ((31, 30), (7, 6))],
)
def test_longest_first_keeps_the_shorter_text(
    sizes: tuple[int, int], kept: tuple[int, int]
) -> None:
    assert longest_first(*sizes, 13) == kept
    assert longest_first(*sizes, 100) == sizes


@pytest.mark.parametrize(
    ("config", "model", "is_typed"),
    [
        ({"tokenizer_class": "BertTokenizer"}, {}, True),
        ({"tokenizer_class": "BertTokenizerFast"}, {}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "bert"}, False),
        ({}, {"model_type": "bert"}, True),
        ({}, {"model_type": "roberta"}, False),
        ({}, {"model_type": "roberta", "tokenizer_class": "BertTokenizer"}, True),
        (TYPED, {}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids"]}, {}, False),
    ],
)
def test_types_are_given_by_name_else_by_class(
    tmp_path: Path, config: dict[str, Any], model: dict[str, Any], is_typed: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    pair = read(tmp_path, PROCESSORS["bert"], **config)
    assert pair.second([7, 8, 9]) == (5 if is_typed else 0)


@pytest.mark.parametrize(
    ("pair", "word"),
    [
        ("<s> $B </s> $A", "second comes first"),
        ("<s>:1 $A:0 </s>:0 $B:1", "token types"),
        ("<s>:0 $A:0 </s>:1 $B:0", "token types"),
        ("<s>:0 $A:0 </s>:0 $B:0 </s>:1", "token types"),
    ],
)
def test_template_of_another_form_raises_error_naming_the_file(
    tmp_path: Path, pair: str, word: str
) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        read(tmp_path, template(pair), **TYPED)
    assert "tokenizer.json" in str(caught.value)
