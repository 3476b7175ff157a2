"""The first stage of the seeing demo: its tower learns what each patch of a drawn picture shows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.offline.demo_training.draws import Draws
from engine.offline.demo_training.network_vision import Tower, TowerTeacher
from engine.offline.demo_training.pictures import (
    KINDS,
    LABELS,
    MOST_SHAPES,
    TILE,
    draw_scene,
    labels,
    paint,
    tile,
)
from engine.offline.demo_training.trainer import Trainer
from engine.offline.demo_training.vision_material import vision_material

HELD_OUT = 100  # pictures of each kind, whose labels are measured in the training


class Album:
    """Pictures with their labels, in memory."""

    def __init__(self, rng: Draws, count: int, side: int, kind: str = "") -> None:
        """Draw `count` pictures of a kind or of any; `side` is the number of patches of a side."""
        tiles = bytearray()
        marks = bytearray()
        for _ in range(count):
            painted = paint(rng, draw_scene(rng, kind))
            tiles += tile(painted.image)
            marks += labels(painted, side)
        self.tiles_NSSC = bytes_of(tiles, count).unflatten(1, (TILE, TILE, 3))
        self.labels_NKP = bytes_of(marks, count).unflatten(1, (len(LABELS), -1))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.tiles_NSSC[rows], self.labels_NKP[rows]


def bytes_of(content: bytearray, rows: int) -> Tensor:
    """Return bytes as uint8 [rows, bytes of a row], on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.frombuffer(content, dtype=torch.uint8).view(rows, -1).to(device)


def learn_tower(tower: Tower, seed: int, steps: int, save: Callable[[], None]) -> None:
    """Train a tower for `steps` steps on drawn pictures, and save it every 200 steps."""
    per_step = vision_material().tower.pictures_per_step
    pictures = min(vision_material().tower.pictures, steps * per_step)
    side = tower.config.side
    teacher = TowerTeacher(tower, LABELS, MOST_SHAPES).to(tower.post_layernorm.weight.device)
    trainer = Trainer(teacher)
    rng = Draws(seed)
    held_out = {kind: Album(rng, HELD_OUT, side, kind) for kind in KINDS}
    began = time.monotonic()
    album = Album(rng, pictures, side)
    print(f"{pictures} pictures drawn in {time.monotonic() - began:.0f} s", flush=True)
    rounds = math.ceil(steps * per_step / pictures)
    order = torch.cat([torch.randperm(pictures) for _ in range(rounds)]).split(per_step)
    mean = 0.0
    for step, rows in enumerate(order[:steps]):
        half = len(rows) // 2
        batches = [album.batch(rows[:half]), album.batch(rows[half:])]
        loss = trainer.learn_mean(batches, len(rows), tower_rate(step, steps))
        mean = loss if step == 0 else 0.95 * mean + 0.05 * loss
        if step % 50 == 49 or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"tower {step + 1}/{steps}  loss {mean:.4f}  {seconds:.0f} s", flush=True)
        if step % 200 == 199 or step == steps - 1:
            print(
                "  ".join(f"{kind} {right(teacher, held_out[kind])}" for kind in KINDS), flush=True
            )
            save()


def right(teacher: TowerTeacher, album: Album) -> str:
    """Return three shares: of pictures with all counts right, of patches of things with the right
    thing, and with the right colour.
    """
    with torch.no_grad():
        kinds, counts = teacher(album.tiles_NSSC)
    shares = [(counts.argmax(-1) == teacher.counted(album.labels_NKP)).all(1)]
    is_thing = album.labels_NKP[:, 0] > 0
    for kind in (0, 1):
        shares.append((kinds[kind].argmax(-1) == album.labels_NKP[:, kind])[is_thing])
    return " ".join(f"{share.float().mean():.2f}" for share in shares)


def tower_rate(step: int, steps: int) -> float:
    """Return the share of the full learning rates: a warm-up, then half a cosine."""
    return min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
