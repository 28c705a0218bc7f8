"""What is raced: a grid of sizes, those of well-known models, and inputs captured from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flash_rosetta.problem import Inputs, Problem, target_of

CAPTURE = Path(__file__).parent / "data" / "minilm_l6.safetensors"

TOKENS = 16384
"""Tokens of one call: batch x seqlen, as the FlashAttention papers do it."""

HIDDEN = 2048
"""num_heads x head_dim in the grid, the papers' again."""

GRID_HEAD_DIMS = (64, 128, 256)
GRID_SEQLENS = (512, 2048, 8192, 16384)

CPU_HEADS = 2
"""Of the captured heads, those that race on a CPU, where Triton's interpreter takes its time."""


Timed = Literal["forward", "backward", "forward+backward"]
"""What is timed: one of the two functions by itself, or both through autograd."""

DIRECTIONS: tuple[Timed, ...] = get_args(Timed)


def flops(problem: Problem, direction: Timed) -> int:
    """Floating-point operations of what is timed: see `Problem.flops`."""
    if direction == "forward+backward":
        return problem.flops("forward") + problem.flops("backward")
    return problem.flops(direction)


@dataclass(frozen=True)
class Workload:
    """Named inputs of one problem. `load` makes them on a device, the same ones every time.

    `source` says where its sizes come from.
    """

    name: str
    problem: Problem
    load: Callable[[torch.device], Inputs]
    source: str = ""

    def problem_for(self, direction: Timed) -> Problem:
        """The problem as `attention` would pose it for one direction."""
        return replace(self.problem, needs_backward=direction != "forward")


@dataclass(frozen=True)
class Model:
    """The attention of one layer of a well-known model, as its published configuration has it."""

    name: str
    source: str
    sizes: dict[str, Any]
    batch: int = 0  # enough for 16k query tokens


MODELS = (
    Model(
        "gpt2",
        "GPT-2 small: 12 heads of 64, context 1024 (config.json of openai-community/gpt2)",
        {"num_heads": 12, "seqlen_q": 1024, "head_dim": 64, "is_causal": True},
    ),
    Model(
        "llama-3-8b",
        "Llama 3 8B: 32 query and 8 key/value heads of 128, context 8192 (arXiv 2407.21783)",
        {"num_heads": 32, "num_kv_heads": 8, "seqlen_q": 8192, "head_dim": 128, "is_causal": True},
    ),
    Model(
        "qwen2.5-7b",
        "Qwen2.5 7B: 28 query and 4 key/value heads of 128 (arXiv 2412.15115); 4096 tokens",
        {"num_heads": 28, "num_kv_heads": 4, "seqlen_q": 4096, "head_dim": 128, "is_causal": True},
    ),
    Model(
        "bert-base",
        "BERT base: 12 heads of 64, 512 positions (arXiv 1810.04805)",
        {"num_heads": 12, "seqlen_q": 512, "head_dim": 64},
    ),
    Model(
        "minilm-l6",
        "all-MiniLM-L6-v2: 12 heads of 32, trained on 256 word pieces (its model card)",
        {"num_heads": 12, "seqlen_q": 256, "head_dim": 32},
    ),
    Model(
        "vit-b16",
        "ViT-B/16: 12 heads of 64, 14 x 14 patches and a class token (arXiv 2010.11929)",
        {"num_heads": 12, "seqlen_q": 197, "head_dim": 64},
    ),
    Model(
        "whisper-large-v3",
        "Whisper large v3's encoder: 20 heads of 64, 1500 frames (arXiv 2212.04356)",
        {"num_heads": 20, "seqlen_q": 1500, "head_dim": 64},
    ),
    Model(
        "sdxl-cross",
        "SDXL's cross-attention at 64 x 64: 10 heads of 64, 77 text tokens (arXiv 2307.01952)",
        {"num_heads": 10, "seqlen_q": 4096, "seqlen_k": 77, "head_dim": 64},
    ),
    Model(
        "sdxl-self",
        "SDXL's self-attention at 64 x 64: 10 heads of 64 (arXiv 2307.01952)",
        {"num_heads": 10, "seqlen_q": 4096, "head_dim": 64},
    ),
    Model(
        "deepseek-v3",
        "DeepSeek-V3's prefill: 128 heads, 192 for queries and keys, 128 for values "
        "(arXiv 2412.19437); 4096 tokens",
        {"num_heads": 128, "seqlen_q": 4096, "head_dim": 192, "head_dim_v": 128, "is_causal": True},
        batch=1,
    ),
    Model(
        "deepseek-v3-padded",
        "the same with values padded to 192, for kernels that take one width alone",
        {"num_heads": 128, "seqlen_q": 4096, "head_dim": 192, "is_causal": True},
        batch=1,
    ),
)


def workloads(
    which: str,
    device: torch.device,
    head_dims: tuple[int, ...] = (),
    seqlens: tuple[int, ...] = (),
) -> list[Workload]:
    """The workloads of "grid", "named", "captured" or "all" for a device; no filter takes all.

    A CPU gets the captured ones alone, at a tiny size. Raises ValueError when nothing is left.
    """
    found: list[Workload] = []
    if which in ("captured", "all"):
        found += captured(device)
    if which in ("grid", "all") and device.type == "cuda":
        found += grid(device)
    if which in ("named", "all") and device.type == "cuda":
        found += named(device)
    kept = [
        w
        for w in found
        if (not head_dims or w.problem.head_dim in head_dims)
        and (not seqlens or w.problem.seqlen_q in seqlens)
    ]
    if not kept:
        sizes = sorted({(w.problem.head_dim, w.problem.seqlen_q) for w in found})
        raise ValueError(
            f"no workload of {which!r} on {device.type} has head_dim in {list(head_dims) or 'any'} "
            f"and seqlen in {list(seqlens) or 'any'}; (head_dim, seqlen) there: {sizes or 'none'}"
        )
    return kept


def grid(device: torch.device) -> Iterator[Workload]:
    """head_dim x causal x seqlen, 16k tokens each, bf16, standard normal."""
    for head_dim in GRID_HEAD_DIMS:
        for is_causal in (False, True):
            for seqlen in GRID_SEQLENS:
                problem = Problem(
                    batch=TOKENS // seqlen,
                    num_heads=HIDDEN // head_dim,
                    seqlen_q=seqlen,
                    head_dim=head_dim,
                    is_causal=is_causal,
                    target=target_of(device),
                )
                yield Workload("grid", problem, problem.inputs, "16k tokens, 2048 wide")


def named(device: torch.device) -> Iterator[Workload]:
    """The attention of MODELS, bf16, standard normal."""
    for model in MODELS:
        problem = Problem(
            batch=model.batch or TOKENS // model.sizes["seqlen_q"],
            target=target_of(device),
            **model.sizes,
        )
        yield Workload(model.name, problem, problem.inputs, model.source)


def captured(device: torch.device) -> Iterator[Workload]:
    """Each captured attention call. On a GPU in bf16, as it is and then tiled to a full card.

    Tiling repeats the call along batch until it holds 16k tokens: each copy has its own memory and
    is computed anew, so the time is that of a large batch, though its values repeat. On a CPU: the
    first two heads, in fp32, which holds the captured bf16 numbers exactly. Everywhere as views
    of [batch, seqlen, num_heads, head_dim], the layout that the model itself has.
    """
    from safetensors import safe_open

    with safe_open(CAPTURE, "pt") as file:
        names = sorted({key.rpartition(".")[0] for key in file.keys()})  # noqa: SIM118 (no mapping)
    for name in names:
        title = f"captured-minilm-l6-{name.replace('.', '-')}"
        if device.type == "cuda":
            yield _captured(title, name, device)
            seqlen = _read(name)[0].shape[1]
            yield _captured(f"{title}-tiled", name, device, copies=TOKENS // seqlen)
        else:
            yield _captured(title, name, device, num_heads=CPU_HEADS, dtype=torch.float32)


def _captured(
    title: str,
    name: str,
    device: torch.device,
    *,
    copies: int = 1,
    num_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Workload:
    def load(device: torch.device) -> Inputs:
        q, k, v, do = (
            t[:, :, :num_heads].to(device, dtype).repeat(copies, 1, 1, 1).transpose(1, 2)
            for t in _read(name)
        )
        return Inputs(q, k, v, do, dlse=torch.zeros(q.shape[:3], device=device))

    _, seqlen, heads, head_dim = _read(name)[0].shape
    problem = Problem(
        batch=copies,
        num_heads=num_heads or heads,
        seqlen_q=seqlen,
        head_dim=head_dim,
        dtype=dtype,
        target=target_of(device),
    )
    source = "all-MiniLM-L6-v2's own numbers on the Zen of Python: see bench/data/README.md"
    return Workload(title, problem, load, source)


def _read(name: str) -> tuple[Tensor, ...]:
    """q, k, v, do of one captured call as the model has them, [1, seqlen, num_heads, head_dim]."""
    from safetensors import safe_open

    with safe_open(CAPTURE, "pt") as file:
        return tuple(file.get_tensor(f"{name}.{t}") for t in ("q", "k", "v", "do"))
