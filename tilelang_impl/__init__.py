"""FlashAttention in TileLang: `backend` runs it on NVIDIA GPUs."""

from flash_rosetta.tilelang_impl.backend import backend

__all__ = ["backend"]
