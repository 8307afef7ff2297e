"""Checkpoints of a sharded policy: the same run again on two processes, on one, and under DDP, and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stapo_lightning.checkpoint_io import AtomicCheckpointIO, read_folder
from stapo_lightning.cli import run
from tests.cli_worker import run_commands

# Eight updates of two prompts, four prompts a rollout; AdamW with a warm-up, so that moments and counters matter.
WHOLE, HALF = 8, 4
SHARDED = "stapo_lightning.strategy.ShardedStrategy"


def _fit(root: Path, name: str, strategy: str, updates: int, *flags: str, subcommand: str = "fit") -> list[str]:
    return [
        subcommand,
        "--config=configs/quickstart.yaml",
        f"--trainer.devices={1 if strategy == 'auto' else 2}",
        f"--trainer.strategy={strategy}",
        f"--trainer.max_steps={updates}",
        "--trainer.val_check_interval=2",
        f"--trainer.callbacks={root / 'callbacks.yaml'}",
        f"--trainer.logger.save_dir={root}",
        "--trainer.logger.name=runs",
        f"--trainer.logger.version={name}",
        "--model.prompts_per_update=2",
        "--model.schedule.warmup_updates=6",
        "--model.tokens_per_micro_batch=300",
        "--data.prompts_per_batch=4",
        "--data.sampling.max_new_tokens=24",
        # One problem: the second rank has none, and yet has to take part in the validation.
        "--data.val_prompts.size=1",
        *flags,
    ]


CALLBACKS = """
- class_path: lightning.pytorch.callbacks.ModelCheckpoint
  init_args: {every_n_train_steps: 4, save_last: true}
- class_path: callbacks.ExportHF
"""


def _last(root: Path, name: str) -> Path:
    return root / "runs" / name / "checkpoints" / "last.ckpt"


def _from(root: Path, name: str) -> str:
    return f"--ckpt_path={_last(root, name)}"


def _test(root: Path, name: str, strategy: str, problems: int) -> list[str]:
    flags = [_from(root, "two"), f"--data.test_prompts.size={problems}", "--data.eval_completions_per_batch=4"]
    flags.append(f"--data.test_folder={root / name}")
    return _fit(root, name, strategy, WHOLE, *flags, subcommand="test")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """All runs; "one" is a process, "two" a sharded pair, "ddp" a pair with DDP."""
    root = tmp_path_factory.mktemp("checkpoints")
    (root / "callbacks.yaml").write_text(CALLBACKS)
    run(_fit(root, "one", "auto", WHOLE))
    run(_fit(root, "one_half", "auto", HALF))
    run_commands(
        root,
        [
            _fit(root, "two", "fsdp2", WHOLE),
            _fit(root, "two_half", "fsdp2", HALF),
            _fit(root, "two_half_copy", "fsdp2", HALF),
            _fit(root, "two_half_copy", "fsdp2", WHOLE, "--ckpt_path=last"),
            _fit(root, "one_then_two", "fsdp2", WHOLE, _from(root, "one_half")),
            _fit(root, "two_then_ddp", "ddp", WHOLE, _from(root, "two_half")),
            # Five problems in batches of one, on two ranks: three and two, and one of rank 0 is known from before.
            _test(root, "two_tested", "fsdp2", 1),
            _test(root, "two_tested", "fsdp2", 5),
            _fit(root, "file", SHARDED, HALF, "--trainer.strategy.save_distributed_checkpoint=false"),
        ],
    )
    run(_fit(root, "two_then_one", "auto", WHOLE, _from(root, "two_half")))
    run(_test(root, "one_tested", "auto", 5))
    return root


def _state(path: Path) -> dict:
    return AtomicCheckpointIO().load_checkpoint(path, "cpu")


def _tensors(state: dict) -> dict[str, torch.Tensor]:
    moments = {
        f"{number} {name}": value
        for number, values in state["optimizer_states"][0]["state"].items()
        for name, value in values.items()
    }
    return state["state_dict"] | moments


def _assert_close(left: dict, right: dict, tolerance: float) -> None:
    one, two = _tensors(left), _tensors(right)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.shape == two[name].shape, name
        assert (value - two[name]).abs().max() <= tolerance * value.abs().max(), name
    for key in ("global_step", "stapo", "RolloutDataModule"):
        assert left[key] == right[key]
    groups = [[{k: v for k, v in g.items()} for g in s["optimizer_states"][0]["param_groups"]] for s in (left, right)]
    assert groups[0] == groups[1]


def test_a_folder_holds_a_share_of_each_rank(root):
    folder = _last(root, "two")
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    state = read_folder(folder)
    whole = _state(_last(root, "one"))
    assert {name: value.shape for name, value in _tensors(state).items()} == {
        name: value.shape for name, value in _tensors(whole).items()
    }


def test_two_then_two_bit_for_bit(root):
    _assert_close(_state(_last(root, "two")), _state(_last(root, "two_half_copy")), 0.0)


@pytest.mark.parametrize("name", ["two", "two_then_one", "one_then_two", "two_then_ddp"])
def test_any_number_of_ranks_ends_like_one_process(root, name):
    one, other = _state(_last(root, "one")), _state(_last(root, name))
    assert one["global_step"] == other["global_step"] == WHOLE
    # Eight updates at a rate of up to 1e-4 move most weights by more than 1e-4; the largest weights are about 1.
    for key, value in one["state_dict"].items():
        assert (value - other["state_dict"][key]).abs().max() < 5e-6, key
    # The moments of Adam too, to a thousandth of the largest of their kind.
    _assert_close(one, other, 1e-3)


def test_gathered_into_one_file(root):
    path = _last(root, "file")
    assert path.is_file()
    _assert_close(_state(path), _state(_last(root, "two_half")), 0.0)


def test_the_export_loads_and_is_the_checkpoint(root):
    folder = root / "runs" / "two" / "policy" / "latest"
    weights = load_file(folder / "model.safetensors")
    state = read_folder(_last(root, "two"))["state_dict"]
    assert weights and all(torch.equal(value, state[f"policy.{name}"]) for name, value in weights.items())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.architectures == ["Qwen3ForCausalLM"]


def test_benchmarks_on_ranks_with_different_numbers_of_problems(root):
    one, two = (_completions(root / name) for name in ("one_tested", "two_tested"))
    assert len(one) == 5 * (1 + 4)  # greedy once, sampled four times
    assert one == two


def _completions(folder: Path) -> dict[tuple[str, int, int], str]:
    lines = [line for path in folder.rglob("completions*.jsonl") for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    found = {(row["decoding"], row["problem"], row["sample"]): row["text"] for row in rows}
    assert len(found) == len(rows)  # nothing was sampled twice
    return found
