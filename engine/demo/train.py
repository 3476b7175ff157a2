"""Makes the demo model: `python -m engine.demo.train` writes its text, its tokenizer and its
weights.

    python -m engine.demo.train --steps 4200

One seed fixes the text, the order and the first weights. The text is the same everywhere; the
weights repeat to the bit on the same machine, torch and two threads, and to rounding elsewhere.
A GPU is used where there is one. The run ends with the score on probes.jsonl, whose questions
are asserted to be absent from the training text.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
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
TOKENS_PER_STEP, TOKENS_PER_BATCH = 2048, 1024
WORKERS = 2
MUON_LR, ADAM_LR = 0.02, 2e-3

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


def grouped(drawn: list[Example]) -> list[list[Example]]:
    """Batches of conversations of like length, so that their rows need little padding."""
    groups: list[list[Example]] = [[]]
    for example in sorted(drawn, key=lambda example: len(example[0])):
        length, rows = len(example[0]), groups[-1]
        full = (len(rows) + 1) * length > TOKENS_PER_BATCH
        if rows and (full or length > 8 + 1.2 * len(rows[0][0])):
            groups.append([])
        groups[-1].append(example)
    return groups


def tensors(batch: list[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and the places whose target is learned, each [B, T], padded on the right."""
    width = max(len(ids) for ids, _ in batch)
    rows = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    learned = torch.tensor([marks + [False] * (width - len(marks)) for _, marks in batch])
    return rows[:, :-1].to(device), rows[:, 1:].to(device), learned[:, 1:].to(device)


class Lessons:
    """Draws each step's conversations and asserts that no probe is among them."""

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        probes = read_probes()
        self.tokenizer = tokenizer
        self.limit = limit
        self.author = Author(SEED + 1, held_out_of(probes))
        self.asked = [
            render_text(probe["messages"])
            if is_talk(probe)
            else f"{START}user\n{probe['messages'][-1]['content']}{END}"
            for probe in probes
        ]

    def step(self, progress: float) -> list[list[Example]]:
        """About TOKENS_PER_STEP tokens that mix all topics, in batches of like length."""
        drawn: list[Example] = []
        while sum(len(ids) for ids, _ in drawn) < TOKENS_PER_STEP:
            conversation = self.author.compose(progress)
            text = render_text(conversation.messages, conversation.tools)
            assert not any(question in text for question in self.asked), f"a probe: {text}"
            drawn.append(encode(self.tokenizer, conversation, self.limit))
        return grouped(drawn)


def learning_rate(step: int, steps: int) -> float:
    """Share of the full rate: a short rise, full while rehearsing, then a fall to nothing."""
    return min((step + 1) / 60, 1.0, ((1 - step / steps) / 0.88) ** 1.5)


def optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (Jordan et al., 2024), AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    shares = [matrices[worker::WORKERS] for worker in range(WORKERS)]
    muons = [
        torch.optim.Muon(share, lr=MUON_LR, weight_decay=0.02, momentum=0.95) for share in shares
    ]
    return [*muons, torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)]


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Replicas:
    """The model once per worker thread: weights shared, gradients apart and then summed.

    At this size one thread per half of a step is twice as fast as two threads per operation.
    """

    def __init__(self, model: DemoModel, device: torch.device) -> None:
        self.models = [model, *(DemoModel(DemoConfig()) for _ in range(WORKERS - 1))]
        self.device = device
        self.pool = ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))
        for copy in self.models[1:]:
            copy.to(device)
            for parameter, shared in zip(copy.parameters(), model.parameters(), strict=True):
                parameter.data = shared.data

    def learn(self, step: list[list[Example]]) -> float:
        """Leaves in the model the gradients of the mean loss over one step's learned tokens."""
        count = sum(sum(marks[1:]) for batch in step for _, marks in batch)
        halves = [step[worker::WORKERS] for worker in range(WORKERS)]
        losses = list(self.pool.map(self.learn_half, self.models, halves, [count] * WORKERS))
        for model in self.models[1:]:
            for mine, other in zip(self.models[0].parameters(), model.parameters(), strict=True):
                if other.grad is not None:
                    mine.grad = other.grad if mine.grad is None else mine.grad.add_(other.grad)
                    other.grad = None
        torch.nn.utils.clip_grad_norm_(self.models[0].parameters(), 1.0)
        return sum(losses)

    def learn_half(self, model: DemoModel, batches: list[list[Example]], count: int) -> float:
        total = 0.0
        for batch in batches:
            inputs, targets, learned = tensors(batch, self.device)
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = model(inputs, learned)
            loss = F.cross_entropy(logits.float(), targets[learned], reduction="sum") / count
            loss.backward()
            total += loss.item()
        return total


def fit(model: DemoModel, tokenizer: Tokenizer, steps: int, out: Path) -> None:
    """Train for `steps`; the weights so far are saved every 500."""
    lessons = Lessons(tokenizer, DemoConfig().max_position_embeddings)
    replicas = Replicas(model, model.model.embed_tokens.weight.device)
    chosen = optimizers(model)
    full_rates = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    began, mean = time.monotonic(), 0.0
    for step in range(steps):
        for optimizer, rate in zip(chosen, full_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate(step, steps)
        loss = replicas.learn(lessons.step(step / steps))
        list(replicas.pool.map(update, chosen))
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
    (out / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


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
    parser.add_argument("--steps", type=int, default=4200)
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    author, config = Author(SEED, held_out_of(read_probes())), DemoConfig()
    sample = islice(author.conversations(), 30_000)
    tokenizer = train_tokenizer(
        (render_text(c.messages, c.tools) for c in sample), config.vocab_size
    )
    save_settings(tokenizer, config, arguments.out)
    model = DemoModel(config).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device.type}", flush=True)
    fit(model, tokenizer, arguments.steps, arguments.out)
    save_weights(model, arguments.out)
    print(score(model, tokenizer).table())


if __name__ == "__main__":
    main()
