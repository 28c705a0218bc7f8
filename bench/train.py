"""`flash-rosetta train`: a small GPT learns Python's own documentation with a backend's attention.

The text is what `help()` shows of the language, the module `pydoc_data.topics` that every Python
ships (PSF licence): its bytes differ from one Python to the next, so records carry their hash. A
seed fixes the weights and the order of the batches: any two runs differ in attention alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from flash_rosetta import registry
from flash_rosetta.backend import Unsupported
from flash_rosetta.bench.contenders import SDPA, contender
from flash_rosetta.bench.gpt import GPT, Attend, Sizes
from flash_rosetta.problem import Problem, target_of

Record = dict[str, Any]

GPU_SIZES = Sizes(layers=6, num_heads=8, head_dim=64, seqlen=1024, batch=16)
CPU_SIZES = Sizes(layers=2, num_heads=2, head_dim=16, seqlen=64, batch=4)
GPU_STEPS, CPU_STEPS = 300, 20
LEARNING_RATE = 6e-4
WARMUP_STEPS = 20
"""Steps over which the learning rate rises; they are left out of the speed as well."""


def main(argv: list[str] | None = None) -> int:
    """Train once and print how the loss fell. 0, or 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="flash-rosetta train",
        description="Train a small GPT on Python's own documentation, attention by one backend.",
    )
    add = parser.add_argument
    add(
        "--backend",
        required=True,
        metavar="NAME",
        help=f"a registered backend, a variant of one, or {', '.join(SDPA)}",
    )
    add("--steps", type=_steps, metavar="N", help=f"default: {GPU_STEPS}, {CPU_STEPS} on a CPU")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    add("--device", choices=("cuda", "cpu"), help="default: the GPU, where there is one")
    add("--out", type=Path, metavar="FILE", help="write the record, losses included, as JSON there")
    arguments = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    if arguments.device == "cuda" and not has_gpu:
        parser.error("--device cuda needs a GPU, and PyTorch sees none")
    is_gpu = has_gpu and arguments.device != "cpu"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    if arguments.backend not in SDPA and not registry.is_known(arguments.backend):
        known = ", ".join([*registry.names(), *SDPA])
        parser.error(f"--backend must be one of {known}; got {arguments.backend!r}")
    console = Console()
    try:
        record = train(arguments.backend, device, arguments.steps, arguments.seed, console)
    except Unsupported as error:
        parser.error(str(error))
    losses = record["losses"]
    console.print(
        f"{record['backend']}: loss {losses[0]:.3f} -> {record['final_loss']:.3f} in "
        f"{len(losses)} steps, {record['tokens_per_s']:,.0f} tokens/s",
        highlight=False,
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(record) + "\n")
        console.print(f"wrote {arguments.out}", highlight=False)
    return 0


def _steps(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {steps}")
    return steps


def text() -> bytes:
    """What the model learns: Python's language reference as `help()` shows it, topic by topic."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def batches(sizes: Sizes, steps: int, seed: int) -> Iterator[Tensor]:
    """Bytes [batch, seqlen + 1] from random places of the text, the same for a seed."""
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - sizes.seqlen, (sizes.batch,), generator=generator)
        yield torch.stack([data[start : start + sizes.seqlen + 1] for start in starts])


def train(
    name: str,
    device: torch.device,
    steps: int | None = None,
    seed: int = 0,
    console: Console | None = None,
    sizes: Sizes | None = None,
) -> Record:
    """One run: losses, tokens per second, and what is needed to repeat it.

    `name` is a backend's, or one of SDPA's. On a GPU attention runs in bf16, under autocast; on a
    CPU in fp32. Raises Unsupported if the backend cannot run the model's attention.
    """
    is_gpu = device.type == "cuda"
    sizes = sizes or (GPU_SIZES if is_gpu else CPU_SIZES)
    steps = steps or (GPU_STEPS if is_gpu else CPU_STEPS)
    attend = attention_of(name, problem_of(sizes, device))
    torch.manual_seed(seed)
    model = GPT(sizes, attend)  # drawn on the CPU: the same weights on any device
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=is_gpu
    )
    losses: list[Tensor] = []
    data = [batch.to(device) for batch in batches(sizes, steps, seed)]
    timed_from, start = min(WARMUP_STEPS, steps // 2), 0.0
    with _progress(console) as show:
        for step, tokens in enumerate(data):
            if step == timed_from:
                _synchronize(device)
                start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
            with torch.autocast("cuda", torch.bfloat16, enabled=is_gpu):
                loss = model.loss(tokens)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            show(name, step + 1, steps, loss)
        _synchronize(device)
        seconds = time.perf_counter() - start
    values = [round(float(loss), 5) for loss in losses]
    last = values[-max(1, steps // 10) :]
    return {
        "backend": name,
        "seed": seed,
        "steps": steps,
        "losses": values,
        "final_loss": round(sum(last) / len(last), 5),
        "tokens_per_s": round(sizes.batch * sizes.seqlen * (steps - timed_from) / seconds),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": sizes.layers,
        "num_heads": sizes.num_heads,
        "head_dim": sizes.head_dim,
        "seqlen": sizes.seqlen,
        "batch": sizes.batch,
        "dtype": "bf16" if is_gpu else "fp32",
        "text_sha256": hashlib.sha256(text()).hexdigest(),
        "text_bytes": len(text()),
    }


def problem_of(sizes: Sizes, device: torch.device) -> Problem:
    """The attention of one layer."""
    return Problem(
        batch=sizes.batch,
        num_heads=sizes.num_heads,
        seqlen_q=sizes.seqlen,
        head_dim=sizes.head_dim,
        is_causal=True,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        target=target_of(device),
        needs_backward=True,
    )


def attention_of(name: str, problem: Problem) -> Attend:
    """Causal attention by a backend, or by one of SDPA's kernels, forced."""
    runner = contender(name)
    if reasons := runner.why_not(problem):
        raise Unsupported(name, reasons, problem)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return runner.attend(q, k, v, problem)

    return attend


class _progress:
    """A bar with the loss, where there is a terminal."""

    def __init__(self, console: Console | None):
        self.progress = None
        if console is not None and console.is_terminal:
            self.progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), console=console,
            )  # fmt: skip
        self.task: Any = None

    def __enter__(self) -> Callable[[str, int, int, Tensor], None]:
        if self.progress is not None:
            self.progress.start()
        return self._show

    def __exit__(self, *exception: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def _show(self, name: str, step: int, steps: int, loss: Tensor) -> None:
        if self.progress is None:
            return
        if self.task is None:
            self.task = self.progress.add_task(name, total=steps)
        if step % 20 == 0 or step == steps:  # reading the loss waits for the GPU
            self.progress.update(self.task, description=f"{name} loss {float(loss):.3f}")
        self.progress.update(self.task, completed=step)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
