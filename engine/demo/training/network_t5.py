"""The translating demo model in its training form: a plain T5 in torch.

It works on token ids only, and produces the weights but never serves them. Parameter names are
those of Hugging Face's T5ForConditionalGeneration, except for the relative bias tables.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from engine.demo.training.network import Batch, linears
from engine.models.t5 import T5Config
from engine.ops.relative_bias import relative_buckets

PAD = 0  # also the first token of every answer
TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias"


class Attention(nn.Module):
    """A norm, unscaled attention under `name`, and a residual connection around both."""

    def __init__(self, config: T5Config, name: str) -> None:
        super().__init__()
        wide, heads = config.hidden, config.heads * config.head_dim
        self.name = name
        self.add_module(
            name, linears(q=(wide, heads), k=(wide, heads), v=(wide, heads), o=(heads, wide))
        )
        self.layer_norm = nn.RMSNorm(wide, config.norm_eps)

    def forward(self, x_BTC: Tensor, bias_BHTS: Tensor, source: Tensor | None = None) -> Tensor:
        """Attend to `x_BTC` itself, or to `source` [B, S, C]. Masked keys have a bias of -inf."""
        normed = self.layer_norm(x_BTC)
        source = normed if source is None else source
        query, key, value = (
            self.get_submodule(f"{self.name}.{part}")(states)
            .unflatten(-1, (bias_BHTS.shape[1], -1))
            .transpose(1, 2)
            for part, states in (("q", normed), ("k", source), ("v", source))
        )
        weights_BHTS = (query @ key.transpose(-1, -2) + bias_BHTS).softmax(-1)
        attended = (weights_BHTS @ value).transpose(1, 2).flatten(2)
        return x_BTC + self.get_submodule(f"{self.name}.o")(attended)


class FeedForward(nn.Module):
    """A norm, a gated GELU, and a residual connection around both."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        wide, inner = config.hidden, config.intermediate
        self.DenseReluDense = linears(wi_0=(wide, inner), wi_1=(wide, inner), wo=(inner, wide))
        self.layer_norm = nn.RMSNorm(wide, config.norm_eps)

    def forward(self, x_BTC: Tensor) -> Tensor:
        normed, linear = self.layer_norm(x_BTC), self.DenseReluDense
        gated = F.gelu(linear["wi_0"](normed), approximate="tanh") * linear["wi_1"](normed)
        return x_BTC + linear["wo"](gated)


class Block(nn.Module):
    """A block of the encoder, or of the decoder if `decodes`."""

    def __init__(self, config: T5Config, *, decodes: bool) -> None:
        super().__init__()
        names = ["SelfAttention", "EncDecAttention"] if decodes else ["SelfAttention"]
        attentions = [Attention(config, name) for name in names]
        self.layer = nn.ModuleList([*attentions, FeedForward(config)])

    def forward(
        self, x_BTC: Tensor, bias: Tensor, source: Tensor | None, source_bias: Tensor
    ) -> Tensor:
        attention, *cross, feed_forward = self.layer
        x_BTC = attention(x_BTC, bias)
        for layer in cross:
            x_BTC = layer(x_BTC, source_bias, source)
        return feed_forward(x_BTC)


class Stack(nn.Module):
    def __init__(self, config: T5Config, layers: int, *, decodes: bool) -> None:
        super().__init__()
        self.config, self.decodes = config, decodes
        self.table = nn.Embedding(config.buckets, config.heads)
        self.block = nn.ModuleList(Block(config, decodes=decodes) for _ in range(layers))
        self.final_layer_norm = nn.RMSNorm(config.hidden, config.norm_eps)

    def distances(self, length: int) -> Tensor:
        """Return the relative position bias [1, H, T, T] of each query and key."""
        c, places = self.config, torch.arange(length, device=self.table.weight.device)
        distance = places - places[:, None]
        buckets = relative_buckets(distance, c.buckets, c.max_distance, not self.decodes)
        bias = self.table(buckets).permute(2, 0, 1)[None]
        return bias.masked_fill(distance > 0, float("-inf")) if self.decodes else bias

    def forward(self, x_BTC: Tensor, hidden_B11S: Tensor, source: Tensor | None = None) -> Tensor:
        """Return the normed states; `hidden_B11S` is -inf where the source is padding, else 0."""
        bias = self.distances(x_BTC.shape[1])
        source_bias = hidden_B11S.expand(-1, self.config.heads, -1, -1)
        if not self.decodes:
            bias = bias + hidden_B11S
        for block in self.block:
            x_BTC = block(x_BTC, bias, source, source_bias)
        return self.final_layer_norm(x_BTC)


class DemoT5(nn.Module):
    """T5 whose head is tied to the token embedding and scales its input."""

    adam_lr = 1e-2  # relative biases grow to several units

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.shared = nn.Embedding(config.vocab_size, config.hidden)
        self.encoder = Stack(config, config.encoder_layers, decodes=False)
        self.decoder = Stack(config, config.decoder_layers, decodes=True)
        for name, parameter in self.named_parameters():
            if name.endswith(".q.weight"):  # attention is not scaled
                nn.init.normal_(parameter, std=(config.hidden * config.head_dim) ** -0.5)
            elif parameter.dim() == 2 and "table" not in name:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        nn.init.normal_(self.shared.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        return {name.replace("table", TABLE): p for name, p in self.state_dict().items()}

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats, summed over the learned tokens: the answers."""
        device, sources, answers = self.shared.weight.device, [], []
        for ids, learned in batch:
            cut = learned.index(True)
            sources.append(torch.tensor(ids[:cut]))
            answers.append(torch.tensor([PAD, *ids[cut:]]))
        source_BS = pad_sequence(sources, batch_first=True, padding_value=PAD).to(device)
        answer_BT = pad_sequence(answers, batch_first=True, padding_value=-100).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = self(source_BS, answer_BT[:, :-1].clamp(min=PAD))
        targets = answer_BT[:, 1:].flatten()
        return F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")

    def forward(self, source_BS: Tensor, answer_BT: Tensor) -> Tensor:
        """Return logits [B, T, vocab] after each token of the answers, which begin with PAD."""
        hidden = torch.zeros_like(source_BS, dtype=torch.float32)
        hidden_B11S = hidden.masked_fill(source_BS == PAD, float("-inf"))[:, None, None]
        states_BSC = self.encoder(self.shared(source_BS), hidden_B11S)
        x_BTC = self.decoder(self.shared(answer_BT), hidden_B11S, states_BSC)
        return F.linear(x_BTC * x_BTC.shape[-1] ** -0.5, self.shared.weight)
