"""TokenViewer: a page that shows every token of some completions with its numbers, to be opened in any browser."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from stapo_lightning.batch import RolloutBatch, UpdateRecord, due
from stapo_lightning.errors import bounded, raise_problems
from stapo_lightning.objective import S2T, squared_logit_gradients
from stapo_lightning.token_text import token_texts

_TEMPLATE = Path(__file__).with_name("token_viewer.html")
_PLACE = "/*DATA*/"

# Marks of a token, bits of one number.
SILENCED, CANDIDATE, CLIPPED = 1, 2, 4


class TokenViewer(L.Callback):
    """Writes `token_viewer/update-<n>.html` into the run's folder: one self-contained page a snapshot.

    Every token of the chosen completions is coloured by its probability, entropy, ratio or share of the update's
    squared logit-gradient norm; silenced and clipped tokens are marked. The numbers appear under the mouse and at the
    keyboard's focus. The page loads nothing, and what the policy wrote is text in it, whatever it looks like.

    Shown are the groups of rank 0 with the most silenced tokens, with all their completions, so that right and wrong
    ones of a prompt stand side by side.

    Args:
        every_n_updates: Updates between two pages, at least 1; the first update and that of trainer.max_steps get one
            as well.
        completions: Completions of a page, at least 1. A page of 64,000 tokens has about 2 MB.

    """

    def __init__(self, every_n_updates: int = 100, completions: int = 16) -> None:
        self.every_n_updates = every_n_updates
        self.completions = completions
        self.latest: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks the arguments, before any weights are loaded."""
        raise_problems(
            bounded("TokenViewer.every_n_updates", self.every_n_updates, at_least=1),
            bounded("TokenViewer.completions", self.completions, at_least=1),
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A broadcast: every rank asks.
        self.folder = Path(trainer.log_dir or trainer.default_root_dir) / "token_viewer"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        record: UpdateRecord = outputs["record"]
        wanted = [n for n in record.update_numbers if due(n, self.every_n_updates) or n == trainer.max_steps]
        if not wanted:
            return
        gradient = squared_logit_gradients(batch, record)
        for _, rows in record.by_update():
            total = pl_module.ranks.sum(gradient[rows].sum())
            gradient[rows] /= total.clamp(min=1e-300)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.latest = self.folder / f"update-{wanted[-1]}.html"
            content = self._content(batch, record, gradient, pl_module)
            self.latest.write_text(page(content), encoding="utf-8")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Says where the last page lies."""
        if stage == "fit" and self.latest is not None:
            print(f"each token   {self.latest}")

    def _content(self, batch: RolloutBatch, record: UpdateRecord, gradient: Tensor, pl_module: Any) -> dict[str, Any]:
        rows = chosen_rows(record.silenced.sum(1).tolist(), batch.group_size, self.completions)
        lengths = batch.completion_lengths.tolist()
        ids = [batch.completion_ids[row, : lengths[row]].tolist() for row in rows]
        texts = token_texts(pl_module.tokenizer, [i for line in ids for i in line])
        place = {token: number for number, token in enumerate(texts)}
        marks = SILENCED * record.silenced + CANDIDATE * record.candidates.int() + CLIPPED * record.clipped.int()
        update_of = {
            row: (n, k) for k, (n, part) in enumerate(record.by_update()) for row in range(*part.indices(10**9))
        }
        selector = pl_module.selector
        completions = []
        for row, line in zip(rows, ids, strict=True):
            update, number = update_of[row]
            end = lengths[row]
            completions.append(
                {
                    "group": int(batch.group_ids[row]),
                    "prompt": batch.prompts[row].text if batch.prompts else "",
                    "answer": batch.prompts[row].answer if batch.prompts else "",
                    "reward": _rounded(float(batch.rewards[row])),
                    "advantage": _rounded(float(batch.advantages[row])),
                    "truncated": bool(batch.truncated[row]),
                    "update": update,
                    "tau_h": _rounded(record.tau_h[number]) if record.tau_h else None,
                    "tokens": [place[i] for i in line],
                    "probability": _rounded_list(record.scores.probs[row, :end]),
                    "entropy": _rounded_list(record.scores.entropy[row, :end]),
                    "ratio": _rounded_list(record.ratio[row, :end]),
                    "gradient": _rounded_list(gradient[row, :end]),
                    "marks": marks[row, :end].tolist(),
                }
            )
        return {
            "updates": list(record.updates),
            "selector": type(selector).__name__,
            "tau_p": selector.tau_p if isinstance(selector, S2T) else None,
            "texts": list(texts.values()),
            "ids": list(texts),
            "completions": completions,
        }


def chosen_rows(silenced: list[int], group_size: int, completions: int) -> list[int]:
    """Rows of the groups with the most silenced tokens; of the last group those with the most where not all fit.

    Args:
        silenced: Silenced tokens of each row.
        group_size: Rows of a group.
        completions: Rows at most.

    """
    groups = [range(start, start + group_size) for start in range(0, len(silenced), group_size)]
    groups.sort(key=lambda rows: -sum(silenced[row] for row in rows))
    chosen: list[int] = []
    for rows in groups:
        room = completions - len(chosen)
        chosen += sorted(sorted(rows, key=lambda row: -silenced[row])[:room])
    return chosen


def page(content: dict[str, Any]) -> str:
    """The HTML of a snapshot. None of its strings can end the element that holds them."""
    data = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_PLACE, data)


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _rounded_list(values: Tensor) -> list[float | None]:
    return [_rounded(value) for value in values.tolist()]
