"""FlashAttention in Triton: `backend` runs it on NVIDIA GPUs, and interpreted on the CPU."""

from flash_rosetta.triton_impl.backend import backend

__all__ = ["backend"]
