"""The shipped translator: small, right on unseen pairs, and its probes are not trained on."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import model_folder
from engine.models.t5 import T5Config
from engine.offline.demo_training.evaluate import judge, read_probes
from engine.offline.demo_training.lexicon import entries, nouns
from engine.offline.demo_training.network_t5 import PAD, TABLE, DemoT5
from engine.offline.demo_training.translation import Grammar, held_out, probes
from tests.support.driver import Driver

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = model_folder("demo-translate")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def translated(texts: list[str]) -> list[str]:
    """Return the engine's fp32 translations, computed in one batch."""
    driver = Driver(FOLDER, max_num_seqs=64)
    ids = [
        driver.submit([PAD], 60, source=tokenizer().encode(text).ids, stop_token_ids=(1,))
        for text in texts
    ]
    driver.run()
    assert {driver.finish(i) for i in ids} == {"stop"}
    return [tokenizer().decode(driver.tokens(i)) for i in ids]


def test_translate_folder_is_at_most_4_mib() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4 * 2**20


def test_training_network_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.T5ForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    model, state = DemoT5(T5Config.from_hf(read_json(FOLDER / "config.json"))), {}
    for name, tensor in reference.state_dict().items():
        state[name.replace(TABLE, "table")] = tensor
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    assert sorted(model.checkpoint()) == sorted(
        name for name in reference.state_dict() if name not in ("lm_head.weight",)
        and "embed_tokens" not in name
    )  # fmt: skip
    sources = [tokenizer().encode(text).ids for text in ("Dan loves icecream", "The dog sees me.")]
    answers = [[PAD, *tokenizer().encode(text).ids] for text in ("Dan älskar glass", "Hunden ser")]
    width = max(map(len, sources))
    source_BS = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sources])
    answer_BT = torch.tensor([ids[:4] for ids in answers])
    with torch.inference_mode():
        logits = model(source_BS, answer_BT)
        for row, ids in enumerate(sources):
            expected = reference.eval()(
                input_ids=torch.tensor([ids]), decoder_input_ids=answer_BT[row : row + 1]
            ).logits[0]
            torch.testing.assert_close(logits[row], expected, atol=1e-3, rtol=1e-3)


def test_translate_dan_loves_icecream_is_dan_alskar_glass() -> None:
    assert translated(["Dan loves icecream", "Dan loves icecream."]) == [
        "Dan älskar glass",
        "Dan älskar glass.",
    ]


def test_translate_unseen_pairs_95_percent_are_right() -> None:
    asked = read_probes("demo-translate")
    answers = translated([probe["messages"][0]["content"] for probe in asked])
    wrong = [
        (probe["expect"][0], answer)
        for probe, answer in zip(asked, answers, strict=True)
        if not judge(probe, answer)
    ]
    assert len(asked) >= 150
    assert len(wrong) <= 0.05 * len(asked), wrong


def test_committed_probes_equal_those_drawn_by_the_grammar() -> None:
    assert read_probes("demo-translate") == probes()


def test_training_text_contains_no_held_out_pair() -> None:
    grammar = Grammar(5)
    drawn = [grammar.sentence() for _ in range(20_000)]
    unseen = {probe["expect"][0].rstrip(".!") for probe in read_probes("demo-translate")}
    assert unseen.isdisjoint(sentence.swedish.rstrip(".!") for sentence in drawn)
    assert not any(re.search(r"\blov\w+ (ice ?cream)", sentence.english) for sentence in drawn)
    pairs = [f"{verb[0]} {noun.one}" for verb in entries("verbs") for noun in nouns()]
    assert 0.05 < sum(map(held_out, pairs)) / len(pairs) < 0.12


def test_grammar_same_seed_draws_same_sentences() -> None:
    first, same, other = ([g.sentence() for _ in range(300)] for g in map(Grammar, (3, 3, 4)))
    assert first == same != other


@pytest.mark.parametrize(
    "text", ["Dan älskar glass.", "Får jag se, Åsa? Nej!", "Quizzical 0123456789 jwxz"]
)
def test_translate_tokenizer_round_trips_text(text: str) -> None:
    ids = tokenizer().encode(text).ids
    assert ids[-1] == tokenizer().token_to_id("</s>") == 1
    assert tokenizer().decode(ids) == text


def test_translate_sentences_written_by_hand_are_right() -> None:
    texts = {
        "The small house is not red.": "Det lilla huset är inte rött.",
        "Did you see my small dog yesterday?": "Såg du min lilla hund igår?",
        "He never sees us.": "Han ser oss aldrig.",
        "She doesn't want three big cars.": "Hon vill inte ha tre stora bilar.",
        "My friends will buy the boat tomorrow.": "Mina vänner ska köpa båten imorgon.",
        "There is a mouse under the bed.": "Det finns en mus under sängen.",
        "Karin lives in Gothenburg.": "Karin bor i Göteborg.",
        "Good morning, Dan!": "God morgon, Dan!",
        "dan loves icecream": "Dan älskar glass",
    }
    assert translated(list(texts)) == list(texts.values())
