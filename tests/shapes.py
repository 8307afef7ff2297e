"""Shapes of published models: their config.json without weights, for plans on machines without a network."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3Config

# Hidden size, layers, attention heads, intermediate size, whether the head is the embedding. Key-value heads (8), width
# of a head (128) and vocabulary (151,936) are those of all three. Read in public copies of the models' config.json and
# in launch scripts that name the same numbers:
#   8B, 14B  citsjtu2020/LLM-Prof  sglang/Model_Config.md
#   1.7B     zyzshishui/slime      scripts/models/qwen3-1.7B.sh (its 8B and 14B agree with the above)
# The base models' own files could not be read here. They are taken to have the same shape; their longest position,
# 32,768, is as in copies of a model that was made from Qwen3-0.6B-Base.
_QWEN3 = {
    "qwen3_1_7b": (2048, 28, 16, 6144, True),
    "qwen3_8b": (4096, 36, 32, 12288, False),
    "qwen3_14b": (5120, 40, 40, 17408, False),
}


def qwen3(name: str) -> Qwen3Config:
    """The shape of "qwen3_1_7b", "qwen3_8b" or "qwen3_14b"."""
    hidden, layers, heads, intermediate, tied = _QWEN3[name]
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
    )


def save(name: str, folder: Path) -> str:
    """Writes config.json of a shape into a folder of its own, and returns the folder."""
    qwen3(name).save_pretrained(folder / name)
    return str(folder / name)
