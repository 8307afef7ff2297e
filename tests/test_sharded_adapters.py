"""An adapter on two processes (gloo): the update of one process, its checkpoints, and the export of sharded weights."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stapo_lightning.checkpoint_io import AtomicCheckpointIO
from stapo_lightning.cli import run
from tests.cli_worker import run_commands
from tests.doubles import TINY

# Updates of two prompts, four prompts a rollout.
WHOLE, HALF = 4, 2
RANK, SCALE = 4, 8.0 / 4

CALLBACKS = """
- class_path: lightning.pytorch.callbacks.ModelCheckpoint
  init_args: {every_n_train_steps: 2, save_last: true}
- class_path: callbacks.ExportHF
- class_path: callbacks.ExportHF
  init_args: {folder: adapter, form: adapter}
"""


def _fit(root: Path, name: str, strategy: str, updates: int, *flags: str) -> list[str]:
    return [
        "fit",
        "--config=configs/quickstart.yaml",
        "--config=configs/scale/lora.yaml",
        f"--trainer.devices={1 if strategy == 'auto' else 2}",
        f"--trainer.strategy={strategy}",
        f"--trainer.max_steps={updates}",
        "--trainer.limit_val_batches=0",
        f"--trainer.callbacks={root / 'callbacks.yaml'}",
        f"--trainer.logger.save_dir={root}",
        "--trainer.logger.name=runs",
        f"--trainer.logger.version={name}",
        f"--model.adapter.rank={RANK}",
        "--model.adapter.alpha=8",
        # The reference is a second forward of the same sharded weights, between a forward and its backward.
        "--model.kl_coef=0.1",
        # Gradients are far below it: a step is in proportion to them, and rounding is not amplified.
        "--model.optimizer.eps=0.1",
        "--model.optimizer.lr=0.1",
        "--model.schedule.warmup_updates=0",
        "--model.prompts_per_update=2",
        "--model.tokens_per_micro_batch=300",
        "--data.prompts_per_batch=4",
        "--data.sampling.max_new_tokens=24",
        *flags,
    ]


def _last(root: Path, name: str) -> Path:
    return root / "runs" / name / "checkpoints" / "last.ckpt"


def _from(root: Path, name: str) -> str:
    return f"--ckpt_path={_last(root, name)}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """All runs; "one" is a process, "two" a sharded pair, "ddp" a pair with DDP."""
    root = tmp_path_factory.mktemp("adapters")
    (root / "callbacks.yaml").write_text(CALLBACKS)
    run(_fit(root, "one", "auto", WHOLE))
    run(_fit(root, "one_half", "auto", HALF))
    run(_fit(root, "one_resumed", "auto", HALF))
    run(_fit(root, "one_resumed", "auto", WHOLE, "--ckpt_path=last"))
    run_commands(
        root,
        [
            _fit(root, "two", "fsdp2", WHOLE, "--model.activation_checkpointing=true"),
            _fit(root, "two_half", "fsdp2", HALF, "--model.activation_checkpointing=true"),
            _fit(root, "two_resumed", "fsdp2", WHOLE, _from(root, "two_half"), "--model.activation_checkpointing=true"),
            _fit(root, "one_then_two", "fsdp2", WHOLE, _from(root, "one_half")),
            _fit(root, "ddp", "ddp", WHOLE),
        ],
    )
    run(_fit(root, "two_then_one", "auto", WHOLE, _from(root, "two_half")))
    return root


def _state(root: Path, name: str) -> dict:
    return AtomicCheckpointIO().load_checkpoint(_last(root, name), "cpu")


def _tensors(state: dict) -> dict[str, torch.Tensor]:
    moments = {
        f"{number} {name}": value
        for number, values in state["optimizer_states"][0]["state"].items()
        for name, value in values.items()
    }
    return state["state_dict"] | moments


@pytest.mark.parametrize("name", ["one", "two", "ddp"])
def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(root, name):
    state = _state(root, name)
    # Four layers, if the tiny policy has not been exchanged, with seven matrices each: A and B.
    layers = AutoModelForCausalLM.from_pretrained(TINY).config.num_hidden_layers
    assert len(state["state_dict"]) == len(state["optimizer_states"][0]["state"]) == layers * 7 * 2
    assert all(".lora_" in key for key in state["state_dict"])
    assert all(value.abs().max() > 0 for value in state["state_dict"].values())
    assert state["global_step"] == WHOLE


@pytest.mark.parametrize(("whole", "resumed"), [("one", "one_resumed"), ("two", "two_resumed")])
def test_resumed_bit_for_bit(root, whole, resumed):
    one, two = _tensors(_state(root, whole)), _tensors(_state(root, resumed))
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("name", ["two", "ddp", "one_then_two", "two_then_one"])
def test_any_number_of_ranks_ends_like_one_process(root, name):
    one, two = _state(root, "one")["state_dict"], _state(root, name)["state_dict"]
    assert one.keys() == two.keys()
    moved = max(float(value.abs().max()) for key, value in one.items() if ".lora_B." in key)
    assert moved > 1e-2
    difference = max(float((value - two[key]).abs().max()) for key, value in one.items())
    print(name, moved, difference)
    assert difference <= 1e-5 * moved


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_merged_export_is_base_and_adapter(root, name):
    merged = load_file(root / "runs" / name / "policy" / "latest" / "model.safetensors")
    base = load_file(Path(TINY) / "model.safetensors")
    state = _state(root, name)["state_dict"]
    assert merged.keys() == base.keys()
    changed = 0
    for key, weight in base.items():
        layer = f"policy.{key.removesuffix('.weight')}"
        if f"{layer}.lora_A.default.weight" in state:
            a, b = (state[f"{layer}.lora_{matrix}.default.weight"] for matrix in "AB")
            weight = weight + SCALE * b @ a
            changed += 1
        torch.testing.assert_close(merged[key], weight, atol=1e-6, rtol=1e-6)
    assert changed == len(state) // 2


@pytest.mark.parametrize("name", ["one", "two"])
def test_both_exports_compute_the_same(root, name):
    folder = root / "runs" / name
    ids = torch.arange(10)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder / "policy" / "latest")(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(TINY)
        before = base(input_ids=ids).logits
        over = PeftModel.from_pretrained(base, folder / "adapter" / "latest")(input_ids=ids).logits
    torch.testing.assert_close(over, merged, atol=1e-4, rtol=1e-5)
    assert (over - before).abs().max() > 1e-2
