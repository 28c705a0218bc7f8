"""Attention of Hugging Face's transformers by a backend, by name.

    model = AutoModel.from_pretrained(folder, attn_implementation=register("triton"))

What is refused is refused by an error: a mask that is more than padding and the causal one,
dropout, anything else that would change the scores.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_rosetta import registry
from flash_rosetta.attention import attention

NAME = "rosetta"
"""Without "flash": transformers takes names that have it for kernels of FlashAttention's own."""

CHANGES_THE_SCORES = ("softcap", "position_bias", "s_aux", "head_mask", "sinks")
"""Options that models pass to their attention and that no backend takes."""

Spans = list[tuple[int, int]]
"""For each sequence of a batch the keys that are no padding: from the first to behind the last."""

_spans_of_mask = WeakTensorKeyDictionary()
"""The version and the spans of masks: all layers of a model get one, and reading it waits for the
GPU."""


def register(backend: str = "auto") -> str:
    """Make a backend known to transformers; returns what to pass as `attn_implementation`.

    "rosetta_triton" for "triton", "rosetta" for "auto". May be called more than once.
    Raises ValueError for a backend that nobody registered, ImportError without transformers.
    """
    if backend != "auto" and not registry.is_known(backend):
        accepted = ", ".join(["auto", *registry.names()])
        raise ValueError(f"backend must be one of {accepted}; got {backend!r}")
    transformers: Any = import_module("transformers")
    masks: Any = import_module("transformers.masking_utils")
    name = NAME if backend == "auto" else f"{NAME}_{backend.replace(':', '_')}"

    def attend(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return _attend(backend, *arguments, **options)

    transformers.AttentionInterface.register(name, attend)
    # None where there is nothing to mask but what is causal, else True where a row sees a key.
    transformers.AttentionMaskInterface.register(name, masks.sdpa_mask)
    return name


def _attend(
    backend: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: o [batch, seqlen_q, num_heads, head_dim], no weights.

    query [batch, num_heads, seqlen_q, head_dim], key and value [batch, num_kv_heads, seqlen_k,
    head_dim], attention_mask None or [batch, 1, seqlen_q, seqlen_k], True where a row sees a key.
    """
    if dropout:
        raise ValueError(f"dropout must be 0, got {dropout}: no backend drops attention weights")
    for name in CHANGES_THE_SCORES:
        if options.get(name) is not None:
            raise ValueError(f"{name} must be None: no backend takes it")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Queries are the last of the sequence: what came before them is in a cache.
        return attention(
            q,
            k,
            v,
            is_causal=is_causal and q.shape[2] > 1,
            causal_alignment="top_left" if q.shape[2] == k.shape[2] else "bottom_right",
            scale=scaling,
            backend=backend,
        )

    if attention_mask is None:
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    spans = _spans(attention_mask, seqlen_q, seqlen_k, is_causal)
    o = query.new_zeros(*query.shape[:3], value.shape[-1])
    for i, (start, end) in enumerate(spans):
        first, last = _queries(start, end, seqlen_q, seqlen_k, is_causal)
        if first < last:
            rows = query[i : i + 1, :, first:last]
            o[i : i + 1, :, first:last] = attend(
                rows, key[i : i + 1, :, start:end], value[i : i + 1, :, start:end]
            )
    return o.transpose(1, 2).contiguous(), None


def _queries(
    start: int, end: int, seqlen_q: int, seqlen_k: int, is_causal: bool
) -> tuple[int, int]:
    """The queries of a sequence that are no padding; all of them where queries are not keys."""
    offset = seqlen_k - seqlen_q
    if not is_causal and offset:
        return 0, seqlen_q
    return max(start - offset, 0), min(end - offset, seqlen_q)


def _spans(mask: Tensor, seqlen_q: int, seqlen_k: int, is_causal: bool) -> Spans:
    """Which keys are no padding, of a mask that says nothing else; ValueError for any other."""
    version, found = _spans_of_mask.get(mask, (None, None))
    if version == mask._version and found is not None:
        known: Spans = found
        return known
    shape = (mask.shape[0], 1, seqlen_q, seqlen_k)
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            "attention_mask must be of torch.bool and [batch, 1, seqlen_q, seqlen_k], "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    rows = mask[:, 0].cpu()
    spans: Spans = []
    keys = torch.arange(seqlen_k)
    positions = torch.arange(seqlen_k - seqlen_q, seqlen_k)
    for seen in rows:
        anyone = seen.any(0).nonzero()[:, 0]
        start, end = (int(anyone[0]), int(anyone[-1]) + 1) if len(anyone) else (0, 0)
        first, last = _queries(start, end, seqlen_q, seqlen_k, is_causal)
        expected = ((keys >= start) & (keys < end)).expand(seqlen_q, -1)
        if is_causal:
            expected = expected & (keys <= positions[:, None])
        if not torch.equal(seen[first:last], expected[first:last]):
            raise ValueError(
                "attention_mask must hide padding at either end of a sequence, and in a causal "
                "layer what comes later; got another one (a window, packed sequences, a prefix), "
                "which no backend takes"
            )
        spans.append((start, end))
    _spans_of_mask[mask] = mask._version, spans
    return spans
