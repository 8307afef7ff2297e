"""GGUF files become ordinary folders."""

import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stapo_lightning.errors import ConfigError
from stapo_lightning.gguf import from_gguf

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(29))]


def _write(path, seed=0):
    """A random Llama of one layer, width 32, in float32, as GGUF keeps it."""
    numbers = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.0] * len(WORDS))
    writer.add_token_types([2, 3, 3, *[1] * 29])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd.weight": (32, 32), "output_norm.weight": (32,), "output.weight": (32, 32),
        "blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32), "blk.0.attn_v.weight": (16, 32), "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (64, 32), "blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64),
    }  # fmt: skip
    tensors = {name: numbers.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_the_folder_holds_the_weights_of_the_file(tmp_path):
    tensors = _write(tmp_path / "small.gguf")
    from_gguf(str(tmp_path / "small.gguf"), str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert np.array_equal(model.lm_head.weight.detach().numpy(), tensors["output.weight"])
    assert np.array_equal(model.model.layers[0].mlp.down_proj.weight.detach().numpy(), tensors["blk.0.ffn_down.weight"])
    assert not hasattr(model.config, "quantization_config")
    assert model.config.eos_token_id == 2


def test_a_package_that_ships_one_can_be_named(tmp_path, monkeypatch):
    package = tmp_path / "ships_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="file='ships_a_model': the package holds 0 GGUF files, not one"):
        from_gguf("ships_a_model", str(tmp_path / "out"))
    _write(package / "small.gguf")
    from_gguf("ships_a_model", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "ships_a_model" not in sys.modules  # found, not run


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"file='nowhere\.gguf': no such file, and no such package"):
        from_gguf("nowhere.gguf", str(tmp_path))
