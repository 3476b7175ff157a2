"""Numbers of GGUF blocks in groups, and what the decoders of all encodings share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOW_HALVES = 0x0F0F0F0F0F0F0F0F


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers in groups: codes [n, groups, size] int8, scales and offsets [n, groups] fp32."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """Return the numbers [n, groups * size] in fp32."""
        found = self.codes * self.scales[..., None]
        if self.offsets is not None:
            found += self.offsets[..., None]
        return found.flatten(1)


def half(raw: torch.Tensor) -> torch.Tensor:
    """Read fp16 numbers: [n, 2 * count] bytes -> [n, count] fp32."""
    return raw.contiguous().view(torch.float16).float()


def nibbles(raw: torch.Tensor) -> torch.Tensor:
    """[n, count] bytes -> [n, 2 * count] numbers below 16: all low halves, then all high ones."""
    words = raw.contiguous().view(torch.int64)  # eight bytes at once take a fifth of the time
    halves = torch.stack((words, words >> 4), -2)
    halves &= LOW_HALVES  # a shift moves the low half of each byte into the byte below it
    return halves.flatten(-2).view(torch.uint8)


def bits(raw: torch.Tensor) -> torch.Tensor:
    """[n, count] bytes -> [n, 8 * count] bits, the lowest of a byte first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (raw[..., None] >> shifts & 1).flatten(-2)


def signed(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8)


def scales_and_offsets(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the two fp16 numbers that a block begins with: [n, 1] fp32 each."""
    return half(raw[:, :2]), half(raw[:, 2:4])


def halves_of_bytes(raw: torch.Tensor) -> torch.Tensor:
    """[n, count] bytes -> [n, 2 * count] numbers below 16: byte by byte, the low half first."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(1)


def pairs_of_bits(raw: torch.Tensor) -> torch.Tensor:
    """[n, parts, count] bytes -> [n, parts, 4, count] numbers below 4, by their place in a byte."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return raw[:, :, None] >> shifts & 3
