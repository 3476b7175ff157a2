"""The seeing demo in its training form: a SigLIP tower, a connector and the demo's Llama, in torch.

Parameter names are those of Hugging Face's Idefics3ForConditionalGeneration, except for the patch
embedding, which is a plain matrix here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.idefics3 import Idefics3Config
from engine.models.vision.siglip import SiglipConfig
from engine.offline.demo_training.network import Batch, DemoModel, Example, linears, padded

# Of things, colours and middles. Few patches have a middle.
LABEL_WEIGHTS = (2.0, 2.0, 6.0)
PATCHES = "model.vision_model.embeddings.patch_embedding.weight"


def sines(side: int, hidden: int) -> Tensor:
    """Return sines and cosines [side * side, hidden] of the rows and columns of patches."""
    steps = torch.arange(side, dtype=torch.float32)
    waves = math.pi * (torch.arange(hidden // 4) + 0.5) / (hidden // 4)  # up to half a turn a patch
    angles = torch.outer(steps, waves)
    line = torch.cat((angles.sin(), angles.cos()), dim=1)  # [side, hidden / 2]
    rows = line[:, None].expand(-1, side, -1)
    columns = line[None].expand(side, -1, -1)
    return torch.cat((rows, columns), dim=2).flatten(0, 1)


class TowerLayer(nn.Module):
    """Attention among all patches and an MLP, behind a norm each."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        hidden = config.hidden
        inner = config.intermediate
        self.heads = config.heads
        self.layer_norm1 = nn.LayerNorm(hidden, config.norm_eps)
        self.layer_norm2 = nn.LayerNorm(hidden, config.norm_eps)
        square = (hidden, hidden)
        self.self_attn = linears(
            bias=True, q_proj=square, k_proj=square, v_proj=square, out_proj=square
        )
        self.mlp = linears(bias=True, fc1=(hidden, inner), fc2=(inner, hidden))

    def forward(self, x_NPC: Tensor) -> Tensor:
        x_NPC = x_NPC + self.attend(self.layer_norm1(x_NPC))
        inner = self.mlp["fc1"](self.layer_norm2(x_NPC))
        return x_NPC + self.mlp["fc2"](F.gelu(inner, approximate="tanh"))

    def attend(self, x_NPC: Tensor) -> Tensor:
        heads_NHPD = [
            self.self_attn[name](x_NPC).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        ]
        query_NHPD, key_NHPD, value_NHPD = heads_NHPD
        scale = query_NHPD.shape[-1] ** -0.5
        scores_NHPP = (query_NHPD * scale) @ key_NHPD.transpose(-1, -2)
        out_NHPD = scores_NHPP.softmax(-1) @ value_NHPD
        return self.self_attn["out_proj"](out_NHPD.transpose(1, 2).flatten(2))


class Embeddings(nn.Module):
    """Patches as vectors, and a vector for each place."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(config.patch_numbers, config.hidden)
        self.position_embedding = nn.Embedding(config.side**2, config.hidden)


class Encoder(nn.Module):
    """The layers of the tower."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TowerLayer(config) for _ in range(config.layers))


class Tower(nn.Module):
    """SigLIP's vision transformer (arXiv 2303.15343)."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden, config.norm_eps)

    def forward(self, pixels_NSSC: Tensor) -> Tensor:
        """Return the states [N, patches, hidden] of pixels uint8 [N, side, side, 3]."""
        size = self.config.patch_size
        numbers_NCSS = pixels_NSSC.permute(0, 3, 1, 2).float() / 127.5 - 1
        patches_NKP = F.unfold(numbers_NCSS, size, stride=size)  # K: numbers of a patch
        x_NPC = self.embeddings.patch_embedding(patches_NKP.transpose(1, 2))
        x_NPC = x_NPC + self.embeddings.position_embedding.weight
        for layer in self.encoder.layers:
            x_NPC = layer(x_NPC)
        return self.post_layernorm(x_NPC)


class DemoVision(nn.Module):
    """Idefics3 (arXiv 2408.12637) with one tile of each picture."""

    adam_lr = DemoModel.adam_lr

    def __init__(self, config: Idefics3Config, image_token: int) -> None:
        super().__init__()
        vision = config.vision
        self.scale = vision.scale
        self.image_token = image_token
        self.vision_model = Tower(vision.tower)
        joined = vision.tower.hidden * vision.scale**2
        self.connector = linears(modality_projection=(joined, vision.hidden))
        self.text_model = DemoModel(config)
        self.draw_weights()

    def draw_weights(self) -> None:
        """Draw the initial weights of the tower and the connector. Biases begin at zero."""
        config = self.vision_model.config
        output_std = (2 * config.layers * config.hidden) ** -0.5
        for name, parameter in self.vision_model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("out_proj.weight", "fc2.weight")):
                nn.init.normal_(parameter, std=output_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        positions = self.vision_model.embeddings.position_embedding.weight
        positions.data.copy_(sines(config.side, config.hidden))
        # As large as the embeddings of tokens.
        for connector in self.connector.parameters():
            nn.init.normal_(connector, std=8 * connector.numel() ** -0.5)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the weights under their names in a Hugging Face checkpoint."""
        size = self.vision_model.config.patch_size
        weights = {}
        for name, weight in self.state_dict().items():
            spelled = f"model.{name}".replace("modality_projection.", "modality_projection.proj.")
            if spelled == PATCHES:
                weight = weight.unflatten(1, (-1, size, size))
            weights[spelled] = weight
        return weights

    def read(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint."""
        own = {}
        for name, weight in weights.items():
            plain = weight.flatten(1) if name == PATCHES else weight
            own[name.removeprefix("model.").replace("projection.proj.", "projection.")] = plain
        self.load_state_dict(own)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats, summed over the batch's learned tokens.

        The tower learns nothing from it.
        """
        ids_BT, x_BTC = self.embedded(batch)
        return self.text_model.loss_of(batch, ids_BT, x_BTC)

    def embedded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the ids [B, T] and the embeddings of tokens and pictures."""
        embedding = self.text_model.embed_tokens
        device = embedding.weight.device
        ids_BT = padded([example.ids for example in batch]).to(device)
        pictures = b"".join(picture for example in batch for picture in example.pictures)
        x_BTC = embedding(ids_BT)
        if not pictures:
            return ids_BT, x_BTC
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                states_NPC = self.vision_model(self.tiles(pictures))
            return ids_BT, self.shown(x_BTC, ids_BT, states_NPC)

    @torch.no_grad()
    def is_answered(self, example: Example) -> bool:
        """Whether the model generates all learned tokens at temperature 0."""
        ids_BT, x_BTC = self.embedded([example])
        keep_BT = torch.tensor([example.learned[1:]], device=ids_BT.device)
        logits = self.text_model.decode(x_BTC[:, :-1], keep_BT)
        return torch.equal(logits.argmax(-1), ids_BT[:, 1:][keep_BT])

    def tiles(self, pixels: bytes) -> Tensor:
        """Return the pixels of pictures as uint8 [N, side, side, 3]."""
        side = self.vision_model.config.image_size
        flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        return flat.view(-1, side, side, 3).to(self.text_model.embed_tokens.weight.device)

    def shown(self, x_BTC: Tensor, ids_BT: Tensor, states_NPC: Tensor) -> Tensor:
        """Return the embeddings of tokens, with those of pictures in the image tokens' places."""
        side = self.vision_model.config.side
        squares = states_NPC.unflatten(1, (side, side))
        squares = squares.unflatten(2, (-1, self.scale)).unflatten(1, (-1, self.scale))
        joined = squares.transpose(2, 3).flatten(3).flatten(0, 2)
        seen = self.connector["modality_projection"](joined)
        is_image_BT1 = (ids_BT == self.image_token)[..., None]
        return x_BTC.masked_scatter(is_image_BT1, seen.to(x_BTC.dtype))


class TowerTeacher(nn.Module):
    """A tower with linear layers that are not part of the checkpoint.

    Some label each patch: with the thing that it shows, its colour, and the thing whose middle it
    has. One counts the things of each name from the mean of the patches.
    """

    adam_lr = DemoModel.adam_lr

    def __init__(self, tower: Tower, labels: Sequence[int], most: int) -> None:
        """`labels` are the numbers of labels of each kind, `most` is the largest count."""
        super().__init__()
        self.tower = tower
        hidden = tower.config.hidden
        self.counts = (labels[0] - 1, most + 1)
        self.labellers = nn.ModuleList(nn.Linear(hidden, number) for number in labels)
        self.counter = nn.Linear(hidden, math.prod(self.counts))

    def forward(self, tiles_NSSC: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return logits of labels [N, patches, labels] by kind, and counts [N, names, counts]."""
        with torch.autocast(tiles_NSSC.device.type, torch.bfloat16):
            states_NPC = self.tower(tiles_NSSC)
        states_NPC = states_NPC.float()
        counts = self.counter(states_NPC.mean(1)).unflatten(1, self.counts)
        return [labeller(states_NPC) for labeller in self.labellers], counts

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy, summed over pictures uint8 [N, side, side, 3].

        Their labels are uint8 [N, kinds, patches].
        """
        tiles_NSSC, labels_NKP = batch
        kinds, counts = self(tiles_NSSC)
        total = counts.new_zeros(())
        for weight, logits, labels_NP in zip(
            LABEL_WEIGHTS, kinds, labels_NKP.long().unbind(1), strict=True
        ):
            losses = F.cross_entropy(logits.flatten(0, 1), labels_NP.flatten(), reduction="sum")
            total = total + weight * losses / labels_NP.shape[1]
        targets = self.counted(labels_NKP)
        loss = F.cross_entropy(counts.flatten(0, 1), targets.flatten(), reduction="sum")
        return total + loss

    def counted(self, labels_NKP: Tensor) -> Tensor:
        """Return the number of things [N, names] of each name."""
        names, _ = self.counts
        middles_NPL = F.one_hot(labels_NKP[:, -1].long(), names + 1)
        return middles_NPL.sum(1)[:, 1:]
