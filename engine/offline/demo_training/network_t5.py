"""The translating demo model in its training form: a plain T5 in torch.

It works on token ids only, and produces the weights but never serves them. Parameter names are
those of Hugging Face's T5ForConditionalGeneration, except for the relative bias tables.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.t5 import T5Config
from engine.offline.demo_training.network import Batch, linears, padded
from engine.ops.relative_bias import relative_buckets

PAD = 0  # also the first token of every answer
NO_TARGET = -100  # cross_entropy ignores these targets
TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias"


class Attention(nn.Module):
    """A norm, unscaled attention under `name`, and a residual connection around both."""

    def __init__(self, config: T5Config, name: str) -> None:
        super().__init__()
        hidden = config.hidden
        heads_size = config.heads * config.head_dim
        self.name = name
        self.heads = config.heads
        projections = linears(
            q=(hidden, heads_size),
            k=(hidden, heads_size),
            v=(hidden, heads_size),
            o=(heads_size, hidden),
        )
        self.add_module(name, projections)
        self.layer_norm = nn.RMSNorm(hidden, config.norm_eps)

    def forward(self, x_BTC: Tensor, bias_BHTS: Tensor, source: Tensor | None = None) -> Tensor:
        """Attend to `x_BTC` itself, or to `source` [B, S, C]. Masked keys have a bias of -inf."""
        normed = self.layer_norm(x_BTC)
        if source is None:
            source = normed
        query_BHTD = self.split_heads("q", normed)
        key_BHSD = self.split_heads("k", source)
        value_BHSD = self.split_heads("v", source)
        scores_BHTS = query_BHTD @ key_BHSD.transpose(-1, -2)
        weights_BHTS = (scores_BHTS + bias_BHTS).softmax(-1)
        out_BHTD = weights_BHTS @ value_BHSD
        out_BTC = out_BHTD.transpose(1, 2).flatten(2)
        return x_BTC + self.projection("o")(out_BTC)

    def split_heads(self, part: str, states: Tensor) -> Tensor:
        """Project states [B, S, C] to [B, heads, S, head_dim]."""
        projected = self.projection(part)(states)
        heads_BSHD = projected.unflatten(-1, (self.heads, -1))
        return heads_BSHD.transpose(1, 2)

    def projection(self, part: str) -> nn.Module:
        return self.get_submodule(f"{self.name}.{part}")


class FeedForward(nn.Module):
    """A norm, a gated GELU, and a residual connection around both."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        hidden = config.hidden
        inner = config.intermediate
        self.DenseReluDense = linears(
            wi_0=(hidden, inner),
            wi_1=(hidden, inner),
            wo=(inner, hidden),
        )
        self.layer_norm = nn.RMSNorm(hidden, config.norm_eps)

    def forward(self, x_BTC: Tensor) -> Tensor:
        linear = self.DenseReluDense
        normed = self.layer_norm(x_BTC)
        gate = F.gelu(linear["wi_0"](normed), approximate="tanh")
        gated = gate * linear["wi_1"](normed)
        return x_BTC + linear["wo"](gated)


class Block(nn.Module):
    """A block of the encoder, or of the decoder if `is_decoder`."""

    def __init__(self, config: T5Config, *, is_decoder: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList()
        self.layer.append(Attention(config, "SelfAttention"))
        if is_decoder:
            self.layer.append(Attention(config, "EncDecAttention"))
        self.layer.append(FeedForward(config))

    def forward(
        self, x_BTC: Tensor, bias: Tensor, source: Tensor | None, source_bias: Tensor
    ) -> Tensor:
        attention, *cross, feed_forward = self.layer
        x_BTC = attention(x_BTC, bias)
        for layer in cross:
            x_BTC = layer(x_BTC, source_bias, source)
        return feed_forward(x_BTC)


class Stack(nn.Module):
    """The encoder, or the decoder if `is_decoder`. All blocks share one relative bias table."""

    def __init__(self, config: T5Config, layers: int, *, is_decoder: bool) -> None:
        super().__init__()
        self.config = config
        self.is_decoder = is_decoder
        self.table = nn.Embedding(config.buckets, config.heads)
        self.block = nn.ModuleList()
        for _ in range(layers):
            self.block.append(Block(config, is_decoder=is_decoder))
        self.final_layer_norm = nn.RMSNorm(config.hidden, config.norm_eps)

    def relative_bias(self, length: int) -> Tensor:
        """Return the relative position bias [1, H, T, T] of each query and key."""
        config = self.config
        positions_T = torch.arange(length, device=self.table.weight.device)
        distances_TT = positions_T - positions_T[:, None]
        is_encoder = not self.is_decoder
        buckets_TT = relative_buckets(
            distances_TT, config.buckets, config.max_distance, bidirectional=is_encoder
        )
        bias_TTH = self.table(buckets_TT)
        bias = bias_TTH.permute(2, 0, 1)[None]
        if is_encoder:
            return bias
        is_future = distances_TT > 0
        return bias.masked_fill(is_future, float("-inf"))

    def forward(self, x_BTC: Tensor, hidden_B11S: Tensor, source: Tensor | None = None) -> Tensor:
        """Return the normed states; `hidden_B11S` is -inf where the source is padding, else 0."""
        length = x_BTC.shape[1]
        bias = self.relative_bias(length)
        source_bias = hidden_B11S.expand(-1, self.config.heads, -1, -1)
        if not self.is_decoder:
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
        self.encoder = Stack(config, config.encoder_layers, is_decoder=False)
        self.decoder = Stack(config, config.decoder_layers, is_decoder=True)
        self.draw_weights(config)

    def draw_weights(self, config: T5Config) -> None:
        """Draw the initial weights. The relative biases keep the weights of nn.Embedding."""
        query_std = (config.hidden * config.head_dim) ** -0.5  # attention is not scaled
        for name, parameter in self.named_parameters():
            if name.endswith(".q.weight"):
                nn.init.normal_(parameter, std=query_std)
            elif parameter.dim() == 2 and "table" not in name:
                inputs = parameter.shape[1]
                nn.init.normal_(parameter, std=inputs**-0.5)
        nn.init.normal_(self.shared.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the weights under their names in a Hugging Face checkpoint."""
        weights = {}
        for name, weight in self.state_dict().items():
            weights[name.replace("table", TABLE)] = weight
        return weights

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats, summed over the learned tokens: the answers."""
        device = self.shared.weight.device
        sources = []
        answers = []
        for ids, learned, _ in batch:
            source_length = learned.index(True)
            sources.append(ids[:source_length])
            answers.append([PAD, *ids[source_length:]])
        source_BS = padded(sources, PAD).to(device)
        answer_BT = padded(answers, NO_TARGET).to(device)
        inputs_BT = answer_BT[:, :-1].clamp(min=PAD)
        targets = answer_BT[:, 1:].flatten()
        with torch.autocast(device.type, torch.bfloat16):
            logits = self(source_BS, inputs_BT)
        rows = logits.float().flatten(0, 1)
        return F.cross_entropy(rows, targets, reduction="sum")

    def forward(self, source_BS: Tensor, answer_BT: Tensor) -> Tensor:
        """Return logits [B, T, vocab] after each token of the answers, which begin with PAD."""
        is_padding = source_BS == PAD
        zeros_BS = torch.zeros_like(source_BS, dtype=torch.float32)
        hidden_BS = zeros_BS.masked_fill(is_padding, float("-inf"))
        hidden_B11S = hidden_BS[:, None, None]
        states_BSC = self.encoder(self.shared(source_BS), hidden_B11S)
        x_BTC = self.decoder(self.shared(answer_BT), hidden_B11S, states_BSC)
        scale = x_BTC.shape[-1] ** -0.5
        return F.linear(x_BTC * scale, self.shared.weight)
