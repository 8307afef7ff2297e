"""EvaluationReport: the results of `stapo test` and `stapo validate` as a table, as JSON and in TensorBoard."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from stapo_lightning.evaluation import Estimate, average, by_decoding, estimates


class EvaluationReport(L.Callback):
    """Prints accuracy a decoding and benchmark with 95 % confidence intervals, and writes it to results.json.

    The first table is the paper's: avg@k, a column a benchmark and their average. The others hold all measures. The
    command line adds this callback by itself.
    """

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """After the progress bar has gone."""
        if stage not in ("test", "validate"):
            return
        run = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: every rank asks
        if not trainer.is_global_zero or not pl_module.eval_values:
            return
        folder = trainer.datamodule.results_folder  # type: ignore[attr-defined]
        results = self._results(pl_module)
        tables = [self._overview(results), *self._details(results)]
        console = Console()
        for table in tables:
            console.print(table)
        console.print(f"results      {self._write(folder or run, trainer, pl_module, results)}", soft_wrap=True)
        if folder:
            console.print(f"completions  {folder / 'completions.jsonl'}", soft_wrap=True)
        if isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.add_text("results", "\n\n".join(map(_markdown, tables)), trainer.global_step)

    @staticmethod
    def _results(pl_module: Any) -> list[dict[str, Any]]:
        found = []
        for decoding, benchmarks in by_decoding(pl_module.eval_values).items():
            for evaluation, values in benchmarks:
                means = dict(zip(evaluation.measures, values.mean(0).tolist(), strict=True))
                found.append(
                    {
                        "benchmark": evaluation.benchmark,
                        "decoding": decoding,
                        "problems": len(values),
                        "samples": evaluation.samples,
                        "estimates": estimates(evaluation, values),
                        "means": {name: value for name, value in means.items() if "@" not in name},
                    }
                )
            if len(benchmarks) > 1:
                overall = average([values[:, 0] for _, values in benchmarks])
                found.append({"benchmark": "average", "decoding": decoding, "estimates": {"avg": overall}})
        return found

    @staticmethod
    def _overview(results: list[dict[str, Any]]) -> Table:
        table = Table(title="accuracy, 95 % interval", title_justify="left")
        table.add_column("")
        for name in dict.fromkeys(result["benchmark"] for result in results):
            samples = {
                str(result["samples"]) for result in results if result["benchmark"] == name and "samples" in result
            }
            table.add_column(f"{name}\n{'avg@' + ', '.join(sorted(samples)) if samples else ''}", justify="right")
        rows: dict[str, list[str]] = {}
        for result in results:
            accuracy: Estimate = next(iter(result["estimates"].values()))
            cell = f"{accuracy.value:.1%}\n{100 * accuracy.low:.1f}-{100 * accuracy.high:.1f}"
            rows.setdefault(result["decoding"], []).append(cell)
        for decoding, cells in rows.items():
            table.add_row(decoding, *cells)
        return table

    @staticmethod
    def _details(results: list[dict[str, Any]]) -> list[Table]:
        tables: dict[str, Table] = {}
        for result in results:
            if "means" not in result:
                continue
            decoding = result["decoding"]
            if decoding not in tables:
                tables[decoding] = Table(title=decoding, title_justify="left")
                for column in ("benchmark", "problems", "measure", "value", "95 % interval"):
                    tables[decoding].add_column(
                        column, justify="left" if column in ("benchmark", "measure") else "right"
                    )
            head = [result["benchmark"], str(result["problems"])]
            for measure, value in result["estimates"].items():
                tables[decoding].add_row(*head, measure, f"{value.value:.1%}", f"{value.low:.1%} to {value.high:.1%}")
                head = ["", ""]
            for measure, mean in result["means"].items():
                shown = f"{mean:.1%}" if measure.endswith("_fraction") else f"{mean:,.1f}"
                tables[decoding].add_row("", "", measure, shown, "")
        return list(tables.values())

    @staticmethod
    def _write(folder: Path, trainer: L.Trainer, pl_module: Any, results: list[dict[str, Any]]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "results.json"
        content = {
            "policy": pl_module.policy_name,
            "checkpoint": trainer.ckpt_path,
            "update": trainer.global_step,
            "decodings": [asdict(decoding) for decoding in trainer.datamodule.decodings],  # type: ignore[attr-defined]
            "results": [
                result | {"estimates": {name: asdict(value) for name, value in result["estimates"].items()}}
                for result in results
            ],
        }
        target.write_text(json.dumps(content, indent=1, default=str) + "\n")
        return target


def _markdown(table: Table) -> str:
    columns = [[str(cell).replace("\n", " ") for cell in column.cells] for column in table.columns]
    lines = [f"**{table.title}**", "", f"| {' | '.join(str(c.header).replace(chr(10), ' ') for c in table.columns)} |"]
    lines.append(f"|{'|'.join('--:' if c.justify == 'right' else ':--' for c in table.columns)}|")
    lines += [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    return "\n".join(lines)
