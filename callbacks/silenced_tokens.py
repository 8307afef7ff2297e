"""SilencedTokens: which tokens were silenced, in what context, why, and what the policy would rather have written."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from stapo_lightning.batch import RolloutBatch, Selection, TokenScores, UpdateRecord, due
from stapo_lightning.distributed import Ranks
from stapo_lightning.errors import bounded, raise_problems
from stapo_lightning.microbatch import passes
from stapo_lightning.models import backbone, output_head, rollout_mode
from stapo_lightning.objective import (
    logit_gradient_weight,
    squared_logit_gradient_norm,
    squared_logit_gradients,
)
from stapo_lightning.optional import optional, require
from stapo_lightning.sharding import within
from stapo_lightning.states import join_sequences
from stapo_lightning.token_text import as_code, token_texts, visible

_LIKELIEST = 5

# What is known of a silenced token, one number each; its context and the likeliest tokens follow.
_COLUMNS = (
    "update", "prompt_number", "completion", "position", "token_id", "log_prob", "entropy", "advantage", "reward",
    "ratio", "clipped", "gradient",
)  # fmt: skip


class SilencedTokens(L.Callback):
    """Records every silenced token with its context and the numbers that silenced it, as in the paper's tables.

    `silenced_tokens.jsonl` in the run's folder gets a line a token: context, the token, its probability, entropy and
    advantage, the thresholds, and its share of the update's squared logit-gradient norm. On a schedule the same is
    written to TensorBoard's Text tab with the five tokens that were likelier, and a chart to its Images tab: which
    tokens are silenced how often, against candidates (A > 0 and unlikely) that survive.

    The likeliest tokens come from a forward over the few rows that are shown. It is made right after the selection, as
    an observer of it: with the weights that silenced the token, also in the later updates of a rollout.
    Tokens of all ranks are recorded; rank 0 writes.

    Args:
        every_n_updates: Updates between two entries in TensorBoard, the first update included; 0 for none. Where such
            an update silences nothing, the next that does is shown. The chart needs matplotlib.
        examples: Silenced tokens of an entry, those of the largest gradient first, at least 1.
        context_tokens: Tokens before the silenced one that are kept, at least 1.
        lines_per_update: Most lines that one update adds to the file, at least 1: again the largest gradients.
        bars: Tokens in each half of the chart, at least 1.

    """

    def __init__(
        self,
        every_n_updates: int = 50,
        examples: int = 8,
        context_tokens: int = 24,
        lines_per_update: int = 200,
        bars: int = 20,
    ) -> None:
        self.every_n_updates = every_n_updates
        self.examples = examples
        self.context_tokens = context_tokens
        self.lines_per_update = lines_per_update
        self.bars = bars
        self.frequency: dict[str, Counter[int]] = {"silenced": Counter(), "surviving": Counter()}
        self.drawn_at = 0
        self.last_update = 0
        self.path: Path | None = None
        self._owed = False  # an entry of an update that was due and silenced nothing
        self._observer: Callable[..., None] | None = None
        self._likeliest: dict[int, _Likeliest] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks the arguments, before any weights are loaded."""
        raise_problems(
            bounded("SilencedTokens.every_n_updates", self.every_n_updates, at_least=0),
            bounded("SilencedTokens.examples", self.examples, at_least=1),
            bounded("SilencedTokens.context_tokens", self.context_tokens, at_least=1),
            bounded("SilencedTokens.lines_per_update", self.lines_per_update, at_least=1),
            bounded("SilencedTokens.bars", self.bars, at_least=1),
        )
        if self.every_n_updates and stage == "fit":
            require("matplotlib", "plots", "SilencedTokens (or every_n_updates: 0)")

    # ---- the moment of selection ------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Opens the file, without what a resumed run had written after its checkpoint, and observes the selection."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: every rank asks
        path = folder / "silenced_tokens.jsonl"
        if trainer.is_global_zero:
            kept = path.read_text().splitlines(keepends=True) if path.exists() else []
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(line for line in kept if _is_up_to(line, trainer.global_step)))
        self.path = path

        def observe(batch: RolloutBatch, scores: TokenScores, selection: Selection, update: int) -> None:
            self.on_selection(pl_module, batch, scores, selection, update)

        self._observer = observe
        pl_module.selection_observers.append(observe)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Draws the last chart."""
        self._stop_observing(pl_module)
        if self.every_n_updates and self.last_update > self.drawn_at:
            self._draw(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Says where the file lies, after the progress bar has gone."""
        if stage == "fit" and trainer.is_global_zero and self.path is not None:
            print(f"which tokens {self.path}")

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Leaves the module as it was."""
        self._stop_observing(pl_module)

    def _stop_observing(self, pl_module: Any) -> None:
        if self._observer in pl_module.selection_observers:
            pl_module.selection_observers.remove(self._observer)

    def on_selection(
        self, pl_module: Any, batch: RolloutBatch, scores: TokenScores, selection: Selection, update: int
    ) -> None:
        """Finds the likeliest tokens in the places of the silenced ones that may be shown.

        Args:
            pl_module: With the policy whose scores these are.
            batch: The mini-batch of this rank.
            scores: Its scores.
            selection: Of its tokens.
            update: Number of the update, from 1.

        """
        # Where an update that is due silences nothing, the next one that does is shown.
        if self._owed or self._likeliest or due(update, self.every_n_updates):
            advantages = batch.advantages[:, None]
            surrogate = pl_module.surrogate(scores.log_probs - batch.old_log_probs, advantages)
            clipped = surrogate.clipped_low | surrogate.clipped_high
            weight = logit_gradient_weight(surrogate.ratio, advantages, clipped)
            gradient = squared_logit_gradient_norm(weight, scores.probs, scores.collision)
            row, step = selection.silenced.nonzero(as_tuple=True)
            largest = gradient[row, step].argsort(descending=True, stable=True)[: self.examples]
            self._likeliest[update] = _likeliest(pl_module, batch, row[largest], step[largest])

    # ---- after the updates ------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        record: UpdateRecord = outputs["record"]
        self.last_update = record.updates[1]
        self._count(batch, record, pl_module.ranks)
        for update, entries in self._entries(pl_module, batch, record):
            self._owed = self._owed or due(update, self.every_n_updates)
            if trainer.is_global_zero and self.path is not None:
                with self.path.open("a") as file:
                    file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
                if self._owed and entries and isinstance(trainer.logger, TensorBoardLogger):
                    text = as_markdown(entries[: self.examples], type(pl_module.selector).__name__)
                    trainer.logger.experiment.add_text("silenced_tokens", text, update)
            self._owed = self._owed and not entries
        self._likeliest.clear()
        if record.is_due(self.every_n_updates):
            self._draw(trainer, pl_module)

    def _count(self, batch: RolloutBatch, record: UpdateRecord, ranks: Ranks) -> None:
        for kind, chosen in (("silenced", record.silenced), ("surviving", record.candidates & ~record.silenced)):
            ids, counts = batch.completion_ids[chosen].unique(return_counts=True)
            pairs = zip(ranks.gather(ids).tolist(), ranks.gather(counts).tolist(), strict=True)
            for token, count in pairs:
                self.frequency[kind][token] += count

    def _entries(
        self, pl_module: Any, batch: RolloutBatch, record: UpdateRecord
    ) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The number of each update with its silenced tokens of all ranks, the largest gradients first."""
        gradient = squared_logit_gradients(batch, record)
        for place, (update, rows) in enumerate(record.by_update()):
            total = float(pl_module.ranks.sum(gradient[rows].sum()))
            row, step = record.silenced[rows].nonzero(as_tuple=True)
            row = row + rows.start
            count = int(pl_module.ranks.sum(torch.tensor(len(row), device=row.device)))
            largest = gradient[row, step].argsort(descending=True, stable=True)[: self.lines_per_update]
            table = self._table(batch, record, gradient, row[largest], step[largest], rows.start, update)
            lines = pl_module.ranks.gather(table.flatten()).view(-1, table.shape[1]).tolist()
            lines.sort(key=lambda line: -line[_COLUMNS.index("gradient")])
            shared = {
                "silenced_in_update": count,
                "tau_p": getattr(pl_module.selector, "tau_p", None),
                "tau_h": _number(record.tau_h[place]) if record.tau_h else None,
            }
            yield update, self._lines(pl_module.tokenizer, lines[: self.lines_per_update], total, shared)

    def _table(
        self,
        batch: RolloutBatch,
        record: UpdateRecord,
        gradient: Tensor,
        row: Tensor,
        step: Tensor,
        first_row: int,
        update: int,
    ) -> Tensor:
        """[n, columns] float64, so that one collective carries it: ids are exact in it. -1 where there is no token."""
        scores = record.scores
        columns = [
            torch.full_like(row, update), batch.group_ids[row], batch.uids[row], step, batch.completion_ids[row, step],
            scores.log_probs[row, step], scores.entropy[row, step], batch.advantages[row], batch.rewards[row],
            record.ratio[row, step], record.clipped[row, step], gradient[row, step],
        ]  # fmt: skip
        # The tokens before place t of the completion are the last of prompt and completion up to there.
        ids = join_sequences(batch.rows(row)) if len(row) else batch.completion_ids[:0]
        ends = batch.prompt_lengths[row] + step
        places = ends[:, None] - self.context_tokens + torch.arange(self.context_tokens, device=row.device)
        context = torch.where(places >= 0, ids.gather(1, places.clamp(min=0)), -1) if len(row) else places
        found = self._likeliest.get(update)
        tokens = torch.full((len(row), 2 * _LIKELIEST), -1.0, dtype=torch.float64, device=row.device)
        if found is not None and len(row):
            # Both hold places of this rank, the shown ones among the recorded ones.
            same = (found.row + first_row == row[:, None]) & (found.step == step[:, None])
            line, place = same.nonzero(as_tuple=True)
            tokens[line] = torch.cat([found.ids[place].double(), found.probs[place].double()], 1)
        return torch.cat([torch.stack([c.double() for c in columns], 1), context.double(), tokens], 1)

    def _lines(
        self, tokenizer: Any, table: list[list[float]], total: float, shared: dict[str, Any]
    ) -> list[dict[str, Any]]:
        entries = []
        for line in table:
            value = dict(zip(_COLUMNS, line, strict=False))
            context = [int(i) for i in line[len(_COLUMNS) : -2 * _LIKELIEST] if i >= 0]
            likeliest = [
                (int(i), p) for i, p in zip(line[-2 * _LIKELIEST : -_LIKELIEST], line[-_LIKELIEST:], strict=True)
            ]
            known = [(i, p) for i, p in likeliest if i >= 0]
            token = int(value["token_id"])
            texts = token_texts(tokenizer, [token, *(i for i, _ in known)])
            entries.append(
                {
                    "update": int(value["update"]),
                    "prompt_number": int(value["prompt_number"]),
                    "completion": int(value["completion"]),
                    "position": int(value["position"]),
                    "context": tokenizer.decode(context, clean_up_tokenization_spaces=False),
                    "token": texts[token],
                    "token_id": token,
                    "probability": math.exp(value["log_prob"]),
                    "entropy": value["entropy"],
                    "advantage": value["advantage"],
                    "reward": _number(value["reward"]),
                    "ratio": _number(value["ratio"]),
                    "clipped": bool(value["clipped"]),
                    "gradient_share": _number(value["gradient"] / total) if total else 0.0,
                    **shared,
                    "likeliest": [{"token": texts[i], "token_id": i, "probability": p} for i, p in known] or None,
                }
            )
        return entries

    def _draw(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.drawn_at = self.last_update
        if trainer.is_global_zero and isinstance(trainer.logger, TensorBoardLogger):
            figure = frequency_chart(self.frequency, pl_module.tokenizer, self.bars, self.last_update)
            trainer.logger.experiment.add_figure("silenced_tokens/frequency", figure, self.last_update)

    def state_dict(self) -> dict[str, Any]:
        """The counts of the chart, which shows the whole run, also over a resume."""
        return {"owed": self._owed, "frequency": {kind: dict(counts) for kind, counts in self.frequency.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        self._owed = state_dict["owed"]
        self.frequency = {kind: Counter(counts) for kind, counts in state_dict["frequency"].items()}


@dataclass
class _Likeliest:
    """The likeliest tokens in some places of a mini-batch.

    Attributes:
        row: [n].
        step: [n].
        ids: [n, 5], the likeliest first.
        probs: [n, 5] at the sampling temperature.

    """

    row: Tensor
    step: Tensor
    ids: Tensor
    probs: Tensor


def _likeliest(pl_module: Any, batch: RolloutBatch, row: Tensor, step: Tensor) -> _Likeliest:
    rows = row.unique()
    count = min(_LIKELIEST, pl_module.policy.config.vocab_size)
    ids = row.new_full((len(row), _LIKELIEST), -1)
    probs = torch.full(ids.shape, -1.0, device=row.device)
    # Ranks with sharded weights go through the policy in step, whether they have something to show or not.
    forwards = passes(rows, batch.sequence_lengths, pl_module.tokens_per_micro_batch, pl_module.ranks)
    with rollout_mode(pl_module.policy):
        for number, chosen in enumerate(forwards.rows):
            part = batch.rows(chosen)
            shown, line = (row[:, None] == chosen).nonzero(as_tuple=True)
            if number >= forwards.own:
                shown, line = shown[:0], line[:0]
            logits = _logits(pl_module.policy, part, line, step[shown]).float() / batch.temperature
            top = logits.softmax(-1).topk(count)
            ids[shown, :count] = top.indices
            probs[shown, :count] = top.values.float()
    return _Likeliest(row, step, ids, probs)


def _logits(policy: Any, batch: RolloutBatch, row: Tensor, step: Tensor) -> Tensor:
    """[n, V] of the places `row`, `step` [n]."""

    def forward() -> Tensor:
        hidden = backbone(policy)(join_sequences(batch), batch.sequence_lengths)
        # The state one place before a token predicts it.
        return output_head(policy)(hidden[row, batch.prompt_lengths[row] + step - 1])

    return within(policy, forward)


def _is_up_to(line: str, update: int) -> bool:
    try:
        return json.loads(line)["update"] <= update
    except json.JSONDecodeError:  # a kill cut it off
        return False


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def as_markdown(entries: list[dict[str, Any]], selector: str) -> str:
    """A list of silenced tokens. No table: TensorBoard breaks the words of its narrow columns."""
    first = entries[0]
    bounds = [f"{name} = {first[name]:.4g}" for name in ("tau_p", "tau_h") if first[name] is not None]
    lines = [
        f"**update {first['update']}: {first['silenced_in_update']} silenced** by {selector}"
        f"{' with ' if bounds else ''}{', '.join(bounds)}; the largest gradients first",
        "",
    ]
    for entry in entries:
        context = as_code("…" + entry["context"].replace("\n", " ↵ "))
        lines.append(f"* {context} **{as_code(visible(entry['token']))}**")
        lines.append(
            f"    * probability {_percent(entry['probability'])}, entropy {entry['entropy']:.3g},"
            f" advantage {entry['advantage']:+.2f}; {_percent(entry['gradient_share'] or 0.0)} of the update's squared"
            " gradient norm, had it trained"
        )
        if entry["likeliest"]:
            likelier = [f"{as_code(visible(x['token']))} {_percent(x['probability'])}" for x in entry["likeliest"]]
            lines.append(f"    * likeliest: {', '.join(likelier)}")
    return "\n".join(lines)


def frequency_chart(frequency: dict[str, Counter[int]], tokenizer: Any, bars: int, update: int) -> Any:
    """Silenced tokens and surviving candidates, the commonest first, as shares of their kind.

    Args:
        frequency: Kind -> token id -> times, kinds "silenced" and "surviving".
        tokenizer: Of the policy.
        bars: Tokens of each kind.
        update: Named in the title.

    Returns:
        A matplotlib figure.

    """
    figure = optional("matplotlib.figure", "plots", "SilencedTokens").Figure(
        figsize=(9, 1.6 + 0.24 * bars), layout="constrained"
    )
    figure.suptitle(f"Unlikely tokens of completions with A > 0, up to update {update}")
    titles = {"silenced": "silenced", "surviving": "surviving candidates"}
    for axes, (kind, colour) in zip(
        figure.subplots(1, 2), (("silenced", "#c2410c"), ("surviving", "#1d4ed8")), strict=True
    ):
        counts = frequency[kind]
        total = counts.total()
        axes.set_title(f"{titles[kind]}: {total:,}")
        axes.set_xlabel("share")
        axes.spines[["top", "right"]].set_visible(False)
        # Equal counts in the order of their ids, so that a picture is the same for every number of ranks.
        most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:bars]
        axes.set_ylim(bars - 0.5, -0.5)
        axes.set_yticks([])
        if not most:
            axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
            continue
        shares = [count / total for _, count in most]
        drawn = axes.barh(range(len(most)), shares, color=colour, height=0.72)
        axes.bar_label(drawn, [f"{count:,}" for _, count in most], padding=3, fontsize=8)
        axes.margins(x=0.15)
        texts = token_texts(tokenizer, [i for i, _ in most])
        # What the policy wrote is no formula, whatever dollar signs it holds.
        axes.set_yticks(
            range(len(most)), [drawable(visible(texts[i])) for i, _ in most], parse_math=False, family="monospace"
        )
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    return figure


def drawable(text: str) -> str:
    """The text with what matplotlib's own font lacks as escapes, cut to what fits beside a bar."""
    manager = optional("matplotlib.font_manager", "plots", "SilencedTokens")
    known = manager.get_font(manager.findfont("DejaVu Sans Mono")).get_charmap()
    shown = "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in text)
    return shown if len(shown) <= 18 else shown[:17] + "…"
