"""The shipped demo model loads and answers, and its probes are not in its training text."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.checkpoint.bounded_json import read_json
from engine.models.llama import LlamaConfig
from engine.offline.demo_training.agent_text import PARTS, REVIEW_PARTS, AgentAuthor
from engine.offline.demo_training.chat import END, FOLDER, START, THOUGHT_END, render_text
from engine.offline.demo_training.evaluate import Probe, judge, lengthened, read_probes, written
from engine.offline.demo_training.material import MaterialDraws
from engine.offline.demo_training.network import DemoModel
from engine.offline.demo_training.number_topics import held_out, number_pair
from engine.offline.demo_training.practice_text import PracticeAuthor
from engine.offline.demo_training.text import Author, Conversation, held_out_of, is_talk
from engine.offline.demo_training.vocabulary import encode
from engine.protocol.generate import Grammar
from server.text.load_template import load_template
from tests.support.driver import Driver

# The topics that the later stages of the training add.
ABILITIES = (
    *("new_tool", "two_calls", "two_results", "thought", "schema"),
    *("result_text", "result_json", "result_list", "result_number", "result_error"),
    *("behind_1k", "behind_3k", "behind_6k", "behind_8k", "behind_11k"),
)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def conversations(count: int, seed: int = 3, progress: float = 0.5) -> list[Conversation]:
    author = Author(seed, held_out_of(read_probes()))
    return [author.compose(progress) for _ in range(count)]


def practice(count: int, seed: int = 3) -> list[Conversation]:
    author = PracticeAuthor(seed, held_out_of(read_probes()))
    return [author.compose() for _ in range(count)]


def agent(count: int, parts: Mapping[str, float] = PARTS) -> list[Conversation]:
    author = AgentAuthor(3, held_out_of(read_probes()), parts)
    return [author.compose() for _ in range(count)]


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
    assert out[0, -1].item() == end_id(), "the answer did not end by itself"
    return tokenizer().decode(out[0, len(prompt) : -1].tolist(), skip_special_tokens=False)


def end_id() -> int:
    token = tokenizer().token_to_id(END)
    assert token is not None
    return token


def prompt_of(probe: dict[str, Any]) -> str:
    probe = lengthened(probe)
    effort = probe.get("effort", "none")
    return render_text(probe["messages"], probe.get("tools"), prompt=True, effort=effort)


def schema_grammar(probe: dict[str, Any], end: tuple[int, ...]) -> Grammar:
    source = LLMatcher.grammar_from_json_schema(json.dumps(probe["schema"]))
    return Grammar(source, end, "response_format")


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


def wrong_probes(probes: list[Probe]) -> list[Probe]:
    """Return the probes that our engine answers wrongly, all in one batch."""
    driver = Driver(FOLDER, max_num_seqs=32)
    end = (end_id(),)
    ids = []
    for probe in probes:
        prompt = tokenizer().encode(prompt_of(probe)).ids
        grammar = schema_grammar(probe, end) if "schema" in probe else None
        ids.append(driver.submit(prompt, 150, stop_token_ids=end, grammar=grammar))
    driver.run()
    assert {driver.finish(i) for i in ids} == {"stop"}, "an answer did not end by itself"
    texts = [tokenizer().decode(driver.tokens(i), skip_special_tokens=False) for i in ids]
    return [p for p, text in zip(probes, texts, strict=True) if not judge(p, text)]


@pytest.mark.slow
def test_engine_answers_nine_in_ten_plain_probes_and_two_in_five_of_each_ability() -> None:
    """Our engine answers all probes in one batch. `make demo-eval` does it over HTTP."""
    probes = read_probes()
    wrong = wrong_probes(probes)
    counts = Counter(probe["topic"] for probe in probes)
    failed = Counter(probe["topic"] for probe in wrong)
    for topic in ABILITIES:
        most = 0.6 * counts.pop(topic)
        assert failed.pop(topic, 0) <= most, [p for p in wrong if p["topic"] == topic]
    assert failed.total() <= counts.total() / 10, wrong


@pytest.mark.slow
def test_training_text_contains_no_probe() -> None:
    probes = read_probes()
    drawn = [
        *conversations(500, progress=0.0),
        *conversations(20_000),
        *conversations(2_000, progress=1.0),
        *practice(6_000),
        *agent(3_000),
        *agent(3_000, REVIEW_PARTS),
    ]
    text = "\n".join(render_text(c.messages, c.tools, effort=c.effort) for c in drawn)
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
    assert practice(300) == practice(300)
    assert practice(300) != practice(300, seed=4)


@pytest.mark.parametrize("prompt", [False, True])
def test_served_chat_template_renders_the_training_text(prompt: bool) -> None:
    served = load_template(FOLDER, None)
    assert served is not None
    talks = [*conversations(400), *practice(400), *agent(200)]
    for probe in read_probes():
        effort = probe.get("effort", "none")
        talks.append(Conversation(probe["messages"], probe.get("tools", []), effort))
    call = {"function": {"name": "väder", "arguments": {"ort": "Åre"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    talks.append(Conversation([*FRANCE, called], [call]))
    for messages, tools, effort, _ in talks:
        shown = served.render(
            messages,
            tools=tools or None,
            add_generation_prompt=prompt,
            reasoning_effort=effort,
        )
        assert shown == render_text(messages, tools, prompt, effort)


def test_training_text_digest_matches_shipped_weights() -> None:
    drawn = [*conversations(300, progress=0.1), *conversations(1_000), *conversations(300, 3, 1.0)]
    stages = {
        "14633af454a38b3b": [[c.messages, c.tools] for c in drawn],
        "4bca00363e762ddb": practice(1_000),
        "4d7f7626d7bd8892": agent(500),
        "0edc2faa7ee6dfed": agent(500, REVIEW_PARTS),
    }
    for expected, stage in stages.items():
        text = json.dumps(stage, ensure_ascii=False)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        assert digest == expected, "text changed: train again, then update the digest"


def test_encode_marks_only_assistant_tokens_as_learned() -> None:
    for conversation in [*conversations(300), *practice(300), *agent(150)]:
        if conversation.is_held:
            continue
        ids, learned, _ = encode(tokenizer(), conversation, 9_999)
        spoken = [m for m in conversation.messages if m["role"] == "assistant"]
        marked = [token for token, mine in zip(ids, learned, strict=True) if mine]
        said = tokenizer().decode(marked, skip_special_tokens=False).split(END)
        assert len(said) == len(spoken) + 1
        assert not said[-1]
        for text, message in zip(said, spoken, strict=False):
            answer = text.rpartition(f"{THOUGHT_END}\n\n")[2]
            assert answer == message["content"] or answer.startswith("<tool_call>")


def test_encode_of_held_json_marks_values_and_no_keys_as_learned() -> None:
    answer = '{"name": "Anna", "tags": ["a", "b"], "age": 31}'
    asked = {"role": "user", "content": "Anna is 31."}
    said = {"role": "assistant", "content": answer}
    conversation = Conversation([asked, said], [], is_held=True)
    ids, learned, _ = encode(tokenizer(), conversation, 1024)
    marked = [token for token, mine in zip(ids, learned, strict=True) if mine]
    text = tokenizer().decode(marked, skip_special_tokens=False)
    assert text == f' "Anna", ["a", "b"], 31}}{END}'


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


def test_judge_with_effort_wants_the_thought_and_the_answer() -> None:
    probe = {"match": "contains", "expect": ["15"], "effort": "low", "thought": ["7 + 8"]}
    assert judge(probe, "7 + 8\n</think>\n\n15")
    assert not judge(probe, "15")
    assert not judge(probe, "7 + 8 = 15")
    assert not judge(probe, "9 + 9\n</think>\n\n15")
    assert not judge(probe, "7 + 8 = 15\n</think>\n\n16")


def test_written_message_has_the_form_of_the_model() -> None:
    function = {"name": "f", "arguments": '{"a":1}'}
    message = {"content": None, "reasoning_content": "Hm.", "tool_calls": [{"function": function}]}
    call = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
    assert written(message) == f"Hm.\n</think>\n\n\n{call}"


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
