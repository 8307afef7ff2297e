"""Prompts from Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lightning.data.collector import Conflicts, PromptCollector
from stapo_lightning.data.columns import Columns
from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.data.wording import Wording
from stapo_lightning.errors import ConfigError
from stapo_lightning.optional import optional
from stapo_lightning.prompt import Prompt

# Rows that stand in memory as Python objects at a time.
_BATCH = 10_000


class HFPrompts(PromptSource):
    """Problems from a data set of the Hugging Face hub or from a folder. Rows are numbered from 1.

    Every rank reads all rows and keeps the distinct problems: about half a minute for the 1.8 million rows of
    DAPO-Math-17k, where each problem is repeated a hundred times.

    Args:
        dataset: Hub id such as openai/gsm8k, or a folder: one with data files, or one that save_to_disk wrote.
        split: Split to read, such as train or test; "train[:1000]" takes a part.
        config_name: Configuration of the data set, such as main; "" for its only one.
        columns: Where a row holds what.
        wording: The words around each problem, and whether the policy's chat template is applied.
        name: Source of the rows that name none: evaluation reports one line a source.
        conflicts: Rows that ask the same with different answers: "error", or "drop" leaves such problems out with a
            count, as none of the answers can be trusted. Rows that repeat the answer as well are dropped with a count.
        revision: Commit, tag or branch of a hub data set; "" for the newest.

    """

    def __init__(
        self,
        dataset: str,
        split: str = "train",
        config_name: str = "",
        columns: Columns = Columns(),
        wording: Wording = Wording(),
        name: str = "",
        conflicts: Conflicts = "error",
        revision: str = "",
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.config_name = config_name
        self.columns = columns
        self.wording = wording
        self.name = name
        self.conflicts = conflicts
        self.revision = revision

    def load(self) -> Sequence[Prompt]:
        data = self._open()
        collector = PromptCollector(self.columns, self.wording, self.name, self.conflicts)
        where = f"{self.dataset} [{self.split}]"
        missing = self.columns.missing(data.column_names)
        for problem in missing:
            collector.complain(where, problem)
        if not missing:
            number = 0
            read = data.select_columns(self.columns.top_level(data.column_names)).with_format("arrow")
            for table in read.iter(_BATCH):
                for row in table.to_pylist():
                    number += 1
                    collector.add(where, number, row)
        prompts, self.remarks = collector.finish()
        return prompts

    def _open(self) -> Any:
        """The split as a datasets.Dataset."""
        datasets = optional("datasets", "data", "HFPrompts")
        folder = Path(self.dataset).expanduser()
        saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
        try:
            if saved:
                return self._saved(datasets, folder)
            return datasets.load_dataset(
                str(folder) if folder.is_dir() else self.dataset,
                self.config_name or None,
                split=self.split,
                revision=self.revision or None,
            )
        except ConfigError:
            raise
        except Exception as error:  # datasets raises what its builders, file systems and the hub's client raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                [
                    f"dataset={self.dataset!r}, config_name={self.config_name!r}, split={self.split!r}: cannot be"
                    f" loaded ({type(error).__name__}: {reason}); expected a hub id that this machine can reach or"
                    " has cached, or a folder with data files"
                ]
            ) from error

    def _saved(self, datasets: Any, folder: Path) -> Any:
        """A split of what save_to_disk wrote; a data set that knows of no split is taken whole."""
        loaded = datasets.load_from_disk(str(folder))
        splits = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or self.split): loaded}
        if self.split not in splits:
            raise ConfigError([f"split={self.split!r}: {self.dataset} holds the splits {', '.join(splits)}"])
        return splits[self.split]
