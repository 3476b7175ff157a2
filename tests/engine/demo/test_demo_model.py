"""The shipped demo model loads and answers, and its probes are not in its training text."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoint.folder import read_json
from engine.demo.training.chat import END, FOLDER, START, render_text
from engine.demo.training.evaluate import judge, read_probes, request_messages
from engine.demo.training.material import MaterialDraws
from engine.demo.training.network import DemoModel
from engine.demo.training.number_topics import held_out, number_pair
from engine.demo.training.text import Author, Conversation, held_out_of, is_talk
from engine.demo.training.train import encode
from engine.models.llama import LlamaConfig
from server.text.chat_template import ChatTemplate
from tests.support.driver import Driver

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def conversations(count: int, seed: int = 3, progress: float = 0.5) -> list[Conversation]:
    author = Author(seed, held_out_of(read_probes()))
    return [author.compose(progress) for _ in range(count)]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@cache
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def greedy(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    prompt = tokenizer().encode(render_text(messages, tools, prompt=True)).ids
    with torch.inference_mode():
        out = reference().generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=200)
    assert out[0, -1].item() == tokenizer().token_to_id(END), "the answer did not end by itself"
    return tokenizer().decode(out[0, len(prompt) : -1].tolist(), skip_special_tokens=False)


def test_demo_weights_are_at_most_16_mib() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 16 * 2**20


def test_training_network_equals_transformers() -> None:
    model = DemoModel(LlamaConfig.from_hf(read_json(FOLDER / "config.json")))
    model.load_state_dict(reference().model.state_dict())
    ids = tokenizer().encode(render_text(FRANCE, prompt=True)).ids
    rows = torch.tensor([ids])
    with torch.inference_mode():
        expected = reference()(rows).logits[0]
        torch.testing.assert_close(
            model(rows, torch.ones_like(rows, dtype=torch.bool)), expected, atol=1e-3, rtol=1e-3
        )


def test_demo_model_answers_capital_of_france() -> None:
    assert "Paris" in greedy(FRANCE)


@pytest.mark.parametrize("text", ["hi", "hello there", "who are you?", "thanks", "what can you do"])
def test_demo_model_answers_small_talk(text: str) -> None:
    assert "do not know" not in greedy([{"role": "user", "content": text}])


def test_engine_answers_nine_in_ten_demo_probes() -> None:
    """Our engine answers all probes in one batch. `make demo-eval` does it over HTTP."""
    driver, probes = Driver(FOLDER, max_num_seqs=32), read_probes()
    prompts = [render_text(p["messages"], p.get("tools"), prompt=True) for p in probes]
    end = (tokenizer().token_to_id(END),)
    ids = [
        driver.submit(tokenizer().encode(prompt).ids, 150, stop_token_ids=end) for prompt in prompts
    ]
    driver.run()
    assert {driver.finish(i) for i in ids} == {"stop"}, "an answer did not end by itself"
    texts = [tokenizer().decode(driver.tokens(i), skip_special_tokens=False) for i in ids]
    wrong = [p for p, text in zip(probes, texts, strict=True) if not judge(p, text)]
    assert len(wrong) <= len(probes) / 10, wrong


def test_training_text_contains_no_probe() -> None:
    probes = read_probes()
    drawn = [
        *conversations(500, progress=0.0),
        *conversations(20_000),
        *conversations(2_000, progress=1.0),
    ]
    text = "\n".join(render_text(c.messages, c.tools) for c in drawn)
    assert len(probes) >= 120
    for probe in probes:
        last = f"{START}user\n{probe['messages'][-1]['content']}{END}"
        assert (render_text(probe["messages"]) if is_talk(probe) else last) not in text


def test_number_pair_is_never_held_out() -> None:
    rng = MaterialDraws(5)
    drawn = {number_pair(rng) for _ in range(20_000)}
    assert not any(held_out(a, b) for a, b in drawn)


def test_author_same_seed_draws_same_conversations() -> None:
    assert conversations(300) == conversations(300)
    assert conversations(300) != conversations(300, seed=4)


@pytest.mark.parametrize("prompt", [False, True])
def test_served_chat_template_renders_the_training_text(prompt: bool) -> None:
    served = ChatTemplate.from_folder(FOLDER, None)
    assert served is not None
    talks = [(c.messages, c.tools) for c in conversations(400)]
    talks += [(probe["messages"], probe.get("tools", [])) for probe in read_probes()]
    call = {"function": {"name": "väder", "arguments": {"ort": "Åre"}}}
    talks.append(([*FRANCE, {"role": "assistant", "content": "", "tool_calls": [call]}], [call]))
    for messages, tools in talks:
        shown = served.render(messages, tools=tools or None, add_generation_prompt=prompt)
        assert shown == render_text(messages, tools, prompt)


def test_training_text_digest_matches_shipped_weights() -> None:
    drawn = [*conversations(300, progress=0.1), *conversations(1_000), *conversations(300, 3, 1.0)]
    text = json.dumps(drawn, ensure_ascii=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digest == "14633af454a38b3b", "text changed: train again, then update the digest"


def test_encode_marks_only_assistant_tokens_as_learned() -> None:
    for conversation in conversations(300):
        ids, learned = encode(tokenizer(), conversation, 1024)
        spoken = [m for m in conversation.messages if m["role"] == "assistant"]
        marked = [token for token, mine in zip(ids, learned, strict=True) if mine]
        said = tokenizer().decode(marked, skip_special_tokens=False).split(END)
        assert len(said) == len(spoken) + 1
        assert not said[-1]
        for text, message in zip(said, spoken, strict=False):
            assert text == message["content"] or text.startswith("<tool_call>")


@pytest.mark.parametrize(
    ("match", "expect", "right", "wrong"),
    [
        ("contains", ["4"], ["It is 4.", "4<|im_end|>"], ["14", "-4", "4b", ""]),
        ("contains", ["Paris", "France"], ["paris, in  FRANCE"], ["Paris"]),
        ("exact", ["c-a-t", "cat"], ["C-A-T.", "cat!"], ["the cat"]),
        ("json", [{"a": 1}], ['{"a": 1}'], ['{"a": 2}', '{"a": 1} ok', "{"]),
        ("tool_call", [{"name": "f"}], ['<tool_call>\n{"name": "f"}\n</tool_call>'], ["f", ""]),
    ],
)
def test_judge_accepts_right_and_rejects_wrong_answers(
    match: str, expect: list[Any], right: list[str], wrong: list[str]
) -> None:
    probe = {"match": match, "expect": expect}
    assert [judge(probe, text) for text in right] == [True] * len(right)
    assert [judge(probe, text) for text in wrong] == [False] * len(wrong)


def test_request_messages_render_the_same_prompt() -> None:
    for probe in read_probes():
        direct = render_text(probe["messages"], probe.get("tools"), prompt=True)
        assert render_text(request_messages(probe), None, prompt=True) == direct


@pytest.mark.parametrize(
    "text",
    [
        "Räksmörgås på Åland",
        "日本語 👩‍👩‍👧‍👦 🇸🇪",
        "a\u0301\u200d\ufeff\x00\t\r\n  x",
        "12345 <|im_star",
        "ﷺ𝔘𝔫𝔦",
        "  ",
    ],
)
def test_demo_tokenizer_round_trips_any_text(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


def test_demo_tokenizer_every_digit_is_one_token() -> None:
    assert tokenizer().encode("2048").tokens == ["2", "0", "4", "8"]
