"""What a token leaves in a layer's cache: one row, and what lies where in it.

    LRKV   shared value  K | latents of keys  G R_k | of values  G R_v | shared key, rotated  K
    MLA    common latent  C | private latents  G R

and, with QK-norm, the float32 1/rms of each group's key. Latents are padded to the widths that
lrkv_jax caches; one of them is 1 where keys have biases, which are a row of the factor of keys.
Each part begins at a multiple of 16 bytes. All of G groups of heads are a worker's own.

B requests  T tokens  S slots  G groups of heads  K head width  R rank  C latent width
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """The parts of a row by name: where each begins, and its shape, in elements of the cache."""

    parts: dict[str, tuple[int, tuple[int, ...]]]
    norms: int  # groups whose key's norm is in the row, or 0
    width: int

    @classmethod
    def of(cls, parts: dict[str, list[int]], norms: int, dtype: torch.dtype) -> "Row":
        placed, at, unit = {}, 0, 16 // dtype.itemsize
        for name, shape in (parts | {"norms": [norms * 4 // dtype.itemsize]}).items():
            placed[name] = at, tuple(shape)
            at += -(-torch.Size(shape).numel() // unit) * unit
        return cls(placed, norms, at)

    def pack(self, parts: dict[str, torch.Tensor], norms: torch.Tensor | None) -> torch.Tensor:
        """Rows [T, width] of parts [T, ...] and norms [T, G]."""
        some = next(iter(parts.values()))
        rows = some.new_zeros(len(some), self.width)
        for name, part in parts.items():
            self.read(rows, name)[..., : part.shape[-1]].copy_(part)
        if norms is not None:
            self.read(rows, "norms").copy_(norms.float().contiguous().view(rows.dtype))
        return rows

    def read(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """A part of rows [..., width], as a view."""
        at, shape = self.parts[name]
        size = torch.Size(shape).numel()
        return rows[..., at : at + size].unflatten(-1, shape)

    def read_norms(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The float32 norms [..., G] of rows."""
        if not self.norms:
            return None
        return self.read(rows, "norms").contiguous().view(torch.float32)


def write(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Put rows [T, width] into the pages [pages, slots, width] at the slots that vLLM names."""
    per_page = cache.shape[1]
    cache[slots // per_page, slots % per_page] = rows


def gather(
    cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, longest: int
) -> torch.Tensor:
    """Requests' rows [B, S, width] from their pages [B, N]; zeros past each one's length."""
    per_page = cache.shape[1]
    pages = -(-longest // per_page)
    rows = cache[table[:, :pages].long()].flatten(1, 2)[:, :longest]
    there = torch.arange(longest, device=rows.device) < lengths[:, None]
    return rows.masked_fill(~there[..., None], 0)  # a page may hold anything
