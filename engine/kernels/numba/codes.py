"""Linear layers with quantised weights, on a CPU that multiplies 8-bit numbers (AVX512_VNNI).

A row of inputs is rounded to 8 bits, with a scale for every 128 inputs. Outliers of the row are
left out, and multiplied as they are. All numbers of rows use one kernel, so a row has the same bits
in any batch.
"""

from __future__ import annotations

import torch

from engine.device.openmp import in_threads, parallel
from engine.kernels.numba.call import (
    GROUP,
    LANES,
    OUTLIER,
    OUTLIER_FROM,
    SPAN,
    CodesCall,
    RoundCall,
)
from engine.kernels.numba.cpu import has_avx512_bf16, has_avx512_vnni
from engine.kernels.numba.lookup import code_rows
from engine.kernels.numba.machine_code import kernel_store
from engine.kernels.numba.prepared import PreparedRows, aligned

SHARES = 4  # a thread takes its panels in about this number of parts
PART = 2**15  # inputs that are worth a thread


def has_instructions() -> bool:
    """Return whether this CPU and this build of torch can run the kernels."""
    return has_avx512_vnni() and has_avx512_bf16() and parallel() is not None


class CodesLinear:
    """y = x W^T + b for x [rows, inputs] in bf16. y is bf16, or fp32 if `wide`.

    W is codes * scales + offsets, or without offsets (codes - 2^(bits - 1)) * scales: codes uint8
    [out, in], scales and offsets fp16 [out, in / 32].
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        bits: int,
        bias: torch.Tensor | None = None,
        *,
        wide: bool = False,
    ) -> None:
        self.outputs, inputs = codes.shape
        self._groups = inputs // GROUP
        self._spans = -(-self._groups // SPAN)
        self._bits = bits
        self._zero = 1 << bits - 1 if offsets is None else 0
        self._dtype = torch.float32 if wide else torch.bfloat16
        panels = -(-self.outputs // LANES)
        self._codes = _in_panels(codes, bits, panels)
        parts = [scales] if offsets is None else [scales, offsets]
        self._scales = torch.stack([_by_panel(part, panels) for part in parts], 2)
        self._bias = None if bias is None else _padded(bias[:, None], panels)[:, 0].contiguous()
        store = kernel_store()
        shape = bits, offsets is not None, bias is not None, wide
        self.kernel = store.address("codes.multiply_kernel", *shape)
        self._round = store.address("codes.round_kernel")
        self._padded = panels * LANES
        self.call = CodesCall(
            panels=panels,
            at_once=max(1, panels // (SHARES * torch.get_num_threads())),
            threads=torch.get_num_threads(),
            codes=self._codes.data_ptr(),
            scales=self._scales.data_ptr(),
            bias=0 if self._bias is None else self._bias.data_ptr(),
            groups=self._groups,
            spans=self._spans,
            out_bytes=self._dtype.itemsize * self._padded,
        )

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, outputs] for x [rows, inputs]."""
        rows = x.shape[0]
        out = self.empty(rows)
        rounded = self.prepared(x)
        call = self.call
        for name, (value, _) in rounded.fields.items():
            setattr(call, name, value)
        call.rows = rows
        call.out = out.data_ptr()
        in_threads(self.kernel, call)
        return out[:, : self.outputs]

    def empty(self, rows: int) -> torch.Tensor:
        """Return room for the products [rows, outputs], and for those of padding."""
        return torch.empty(rows, self._padded, dtype=self._dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [T, inputs] of the weight, rounded to bf16, for ids [T]."""
        return code_rows(ids, self._codes, self._scales, self._groups * GROUP, self._bits)

    def prepared(self, x: torch.Tensor) -> PreparedRows:
        """Round x [rows, inputs] for this weight, or another one of the same shape and form."""
        assert x.stride(1) == 1
        rows, groups = x.shape[0], self._groups
        codes = torch.empty(rows, groups, GROUP, dtype=torch.int8)
        # One by one: a recorder cannot replay the split of one tensor into two.
        scales = torch.empty(rows, self._spans)
        sums = torch.empty(rows, groups)
        counts = torch.empty(rows, dtype=torch.int32)
        most = int(x.shape[1] / OUTLIER_FROM**2) + 1  # more would raise the root mean square
        outliers = torch.empty(rows, most, OUTLIER.itemsize // 4, dtype=torch.int32)
        rounding = RoundCall(
            rows=rows,
            at_once=max(1, PART // x.shape[1]),
            groups=groups,
            spans=self._spans,
            bits=self._bits,
            zero=self._zero,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            sums=sums.data_ptr(),
            num_outliers=counts.data_ptr(),
            outliers=outliers.data_ptr(),
            most_outliers=most,
        )
        in_threads(self._round, rounding, alone=x.numel() <= PART)
        tensors = {
            "x": codes,
            "x_scales": scales,
            "x_sums": sums,
            "num_outliers": counts,
            "outliers": outliers,
        }
        return PreparedRows(tensors, {"most_outliers": most})


def _padded(rows: torch.Tensor, panels: int) -> torch.Tensor:
    """Append rows of zeros [outputs, n] -> [panels * 16, n]."""
    missing = panels * LANES - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows


def _in_panels(codes: torch.Tensor, bits: int, panels: int) -> torch.Tensor:
    """Return the codes [panels, groups, quads, 16, 4]; of 4 bits, two quads share each byte."""
    rows = _padded(codes, panels)
    quads = rows.view(panels, LANES, -1, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 4:
        quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4
    return aligned(quads)


def _by_panel(scales: torch.Tensor, panels: int) -> torch.Tensor:
    """Return the scales or offsets [panels, groups, 16]."""
    rows = _padded(scales, panels)
    return rows.view(panels, LANES, -1).transpose(1, 2).contiguous()
