"""The shipped demo model: it loads, answers, and its probes are honest."""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.demo.chat import CHAT_TEMPLATE, END, START, render_text
from engine.demo.evaluate import judge, read_probes, request_messages
from engine.demo.network import DemoConfig, DemoModel
from engine.demo.text import Author, Conversation, held_out_of, is_talk
from engine.demo.topics import held_out, number_pair

FOLDER = Path(__file__).parents[2] / "engine" / "demo" / "model"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def conversations(count: int, seed: int = 3, progress: float = 0.5) -> list[Conversation]:
    author = Author(seed, held_out_of(read_probes()))
    return list(islice(author.conversations(progress), count))


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


def test_weights_are_small() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 16 * 2**20


def test_training_network_equals_transformers() -> None:
    model = DemoModel(DemoConfig())
    weights = {name: p for name, p in reference().state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict(weights)
    ids = tokenizer().encode(render_text(FRANCE, prompt=True)).ids
    rows = torch.tensor([ids])
    with torch.inference_mode():
        expected = reference()(rows).logits[0]
        torch.testing.assert_close(
            model(rows, torch.ones_like(rows, dtype=torch.bool)), expected, atol=1e-3, rtol=1e-3
        )


def test_france() -> None:
    assert "Paris" in greedy(FRANCE)


@pytest.mark.parametrize("text", ["hi", "hello there", "who are you?", "thanks", "what can you do"])
def test_small_talk_is_answered(text: str) -> None:
    assert "do not know" not in greedy([{"role": "user", "content": text}])


def test_sampled_probes_are_answered() -> None:
    sample = read_probes()[::14]
    wrong = [p for p in sample if not judge(p, greedy(p["messages"], p.get("tools")))]
    assert len(sample) >= 12
    assert len(wrong) <= 1, wrong


def test_probes_are_not_in_the_training_text() -> None:
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


def test_held_out_number_pairs_are_never_drawn() -> None:
    author = Author(5, held_out_of([]))
    drawn = {number_pair(author.rng) for _ in range(20_000)}
    assert not any(held_out(a, b) for a, b in drawn)


def test_generator_is_deterministic() -> None:
    assert conversations(300) == conversations(300)
    assert conversations(300) != conversations(300, seed=4)


@pytest.mark.parametrize("prompt", [False, True])
def test_chat_template_equals_training_renderer(prompt: bool) -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.Undefined
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(CHAT_TEMPLATE)
    talks = [(c.messages, c.tools) for c in conversations(400)]
    talks += [(probe["messages"], probe.get("tools", [])) for probe in read_probes()]
    for messages, tools in talks:
        shown = template.render(
            messages=messages, tools=tools or None, add_generation_prompt=prompt
        )
        assert shown == render_text(messages, tools, prompt)


def test_shipped_template_is_the_one_in_the_code() -> None:
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["chat_template"] == CHAT_TEMPLATE


def test_probe_over_http_shows_the_same_prompt() -> None:
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
def test_tokenizer_round_trips(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_one_token() -> None:
    assert tokenizer().encode("2048").tokens == ["2", "0", "4", "8"]
