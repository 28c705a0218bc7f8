"""FlashAttention in CuTe DSL: `backend` runs it on NVIDIA GPUs."""

from flash_rosetta.cute_impl.backend import backend

__all__ = ["backend"]
