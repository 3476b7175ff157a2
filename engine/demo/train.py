"""Makes the demo model: `python -m engine.demo.train` writes its text, its tokenizer and its
weights.

    python -m engine.demo.train --steps 2400

One seed fixes the text, the order and the first weights. The text is the same everywhere; the
weights repeat to the bit on the same machine, torch and two threads, and to rounding elsewhere.
A GPU is used where there is one. The run ends with the score on probes.jsonl, whose questions
are asserted to be absent from the training text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo.chat import (
    CHAT_TEMPLATE,
    END,
    SPECIAL_TOKENS,
    START,
    STOP,
    Message,
    render,
    render_text,
)
from engine.demo.evaluate import Score, judge, read_probes
from engine.demo.network import DemoConfig, DemoModel
from engine.demo.text import Author, Conversation, held_out_of, is_talk
from engine.demo.tokenizer import train_tokenizer

FOLDER = Path(__file__).parent / "model"
SEED = 20260
STEP_TOKENS = {"rehearsal": 1024, "short": 1536, "long": 2048}
TOKENS_PER_BATCH = 1024
MUON_LR, ADAM_LR = 0.02, 2e-3
LONG_SHARE = 0.04  # of the conversations in the last third; they hold a third of its tokens

Example = tuple[list[int], list[bool]]


def encode(tokenizer: Tokenizer, conversation: Conversation, limit: int) -> Example:
    """Token ids of a conversation and which of them the model learns to say."""
    pieces = render(conversation.messages, conversation.tools)
    ids: list[int] = []
    learned: list[bool] = []
    for (_, mine), encoding in zip(
        pieces, tokenizer.encode_batch([text for text, _ in pieces]), strict=True
    ):
        ids += encoding.ids
        learned += [mine] * len(encoding.ids)
    return ids[:limit], learned[:limit]


def batches(
    source: Iterator[Conversation], tokenizer: Tokenizer, tokens: int, limit: int
) -> Iterator[list[list[Example]]]:
    """Endless steps of about `tokens` tokens, each a few batches of conversations of like
    length: the step mixes all topics, and the rows of a batch need little padding.
    """
    while True:
        drawn: list[Example] = []
        while sum(len(ids) for ids, _ in drawn) < tokens:
            drawn.append(encode(tokenizer, next(source), limit))
        drawn.sort(key=lambda example: len(example[0]))
        groups: list[list[Example]] = [[]]
        for example in drawn:
            length, rows = len(example[0]), groups[-1]
            full = (len(rows) + 1) * length > TOKENS_PER_BATCH
            if rows and (full or length > 8 + 1.2 * len(rows[0][0])):
                groups.append([])
            groups[-1].append(example)
        yield groups


def tensors(batch: list[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and the places whose target is learned, each [B, T], padded on the right."""
    width = max(len(ids) for ids, _ in batch)
    rows = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    learned = torch.tensor([marks + [False] * (width - len(marks)) for _, marks in batch])
    return rows[:, :-1].to(device), rows[:, 1:].to(device), learned[:, 1:].to(device)


def unseen(source: Iterator[Conversation], probes: list[dict[str, Any]]) -> Iterator[Conversation]:
    """Pass conversations on, asserting that none asks a probe's question in the probe's words."""
    asked = [
        render_text(probe["messages"])
        if is_talk(probe)
        else f"{START}user\n{probe['messages'][-1]['content']}{END}"
        for probe in probes
    ]
    for conversation in source:
        text = render_text(conversation.messages, conversation.tools)
        assert not any(question in text for question in asked), (
            f"a probe is in the training text: {text}"
        )
        yield conversation


def learning_rate(step: int, steps: int) -> float:
    """Share of the full rate: a short rise, a plateau, and a straight fall."""
    return min((step + 1) / 60, 1.0, (steps - step) / (0.6 * steps))


def stage(step: int, steps: int) -> str:
    """Copying first, then conversations, and in the last third some that fill the context."""
    if step < steps // 10:
        return "rehearsal"
    return "short" if step < steps * 2 // 3 else "long"


def optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (Jordan et al., 2024), AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learn(model: DemoModel, step: list[list[Example]], device: torch.device) -> float:
    """Gradients of the mean loss over one step's learned tokens; returns that loss."""
    total, learned_tokens = 0.0, sum(sum(marks[1:]) for batch in step for _, marks in batch)
    for batch in step:
        inputs, targets, learned = tensors(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(inputs, learned)
        loss = F.cross_entropy(logits.float(), targets[learned], reduction="sum") / learned_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total


def fit(
    model: DemoModel, tokenizer: Tokenizer, steps: int, out: Path, device: torch.device
) -> None:
    """Train for `steps`; the weights so far are saved every 500."""
    probes = read_probes()
    author, limit = Author(SEED + 1, held_out_of(probes)), DemoConfig().max_position_embeddings
    sources = {
        "rehearsal": unseen(author.rehearsals(), probes),
        "short": unseen(author.conversations(), probes),
        "long": unseen(author.conversations(LONG_SHARE), probes),
    }
    stages = {
        name: batches(source, tokenizer, STEP_TOKENS[name], limit)
        for name, source in sources.items()
    }
    chosen = optimizers(model)
    full_rates = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    began, mean = time.monotonic(), 0.0
    for step in range(steps):
        for optimizer, rate in zip(chosen, full_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate(step, steps)
        loss = learn(model, next(stages[stage(step, steps)]), device)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean = loss if step == 0 else 0.98 * mean + 0.02 * loss
        if step % 50 == 0:
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1) / 60
            print(f"step {step}/{steps}  loss {mean:.4f}  {left:.1f} min left", flush=True)
        if step % 500 == 499:
            save_weights(model, out)


def save_weights(model: DemoModel, out: Path) -> None:
    weights = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous()
        for name, p in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def save_settings(tokenizer: Tokenizer, config: DemoConfig, out: Path) -> None:
    """Everything in the folder except the weights."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    tokenizer.save(str(out / "tokenizer.json"))
    settings: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            **vars(config), "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "attention_dropout": 0.0, "rope_scaling": None, "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True, "bos_token_id": ids[STOP], "eos_token_id": ids[END],
            "pad_token_id": ids[STOP],
        },
        "generation_config.json": {
            "bos_token_id": ids[STOP], "eos_token_id": [ids[END], ids[STOP]],
            "pad_token_id": ids[STOP],
            "do_sample": True, "temperature": 0.6, "top_p": 0.95,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "bos_token": None,
            "eos_token": END, "pad_token": STOP, "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings, "chat_template": CHAT_TEMPLATE,
            "added_tokens_decoder": {
                str(number): {"content": token, "lstrip": False, "normalized": False,
                "rstrip": False,
                              "single_word": False, "special": True}
                for token, number in ids.items()
            },
        },
    }  # fmt: skip
    for name, content in settings.items():
        (out / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


@torch.inference_mode()
def answer(
    model: DemoModel,
    tokenizer: Tokenizer,
    messages: list[Message],
    tools: list[dict[str, Any]],
    limit: int = 200,
) -> str:
    """The greedy answer, recomputed from scratch at every token: slow, and nothing to go wrong."""
    prompt = tokenizer.encode(render_text(messages, tools, prompt=True)).ids
    ids, device = list(prompt), model.model.embed_tokens.weight.device
    ends = {tokenizer.token_to_id(END), tokenizer.token_to_id(STOP)}
    while len(ids) < len(prompt) + limit:
        keep = torch.zeros(1, len(ids), dtype=torch.bool, device=device)
        keep[0, -1] = True
        token = int(model(torch.tensor([ids], device=device), keep).argmax())
        if token in ends:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(prompt) :], skip_special_tokens=False)


def score(model: DemoModel, tokenizer: Tokenizer) -> Score:
    """Answers every probe with the weights as they were saved, rounded to bf16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    result = Score()
    for probe in read_probes():
        text = answer(model, tokenizer, probe["messages"], probe.get("tools", []))
        result.add(probe, text, judge(probe, text))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Penstock's demo model.")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    author, config = Author(SEED, held_out_of(read_probes())), DemoConfig()
    sample = islice(author.conversations(), 30_000)
    tokenizer = train_tokenizer(
        (render_text(c.messages, c.tools) for c in sample), config.vocab_size
    )
    save_settings(tokenizer, config, arguments.out)
    model = DemoModel(config).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device.type}", flush=True)
    fit(model, tokenizer, arguments.steps, arguments.out, device)
    save_weights(model, arguments.out)
    print(score(model, tokenizer).table())


if __name__ == "__main__":
    main()
