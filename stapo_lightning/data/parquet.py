"""Prompts from Parquet files."""

from __future__ import annotations

from collections.abc import Sequence

from stapo_lightning.data.collector import Conflicts, PromptCollector
from stapo_lightning.data.columns import Columns
from stapo_lightning.data.files import matching
from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.data.wording import Wording
from stapo_lightning.errors import ConfigError
from stapo_lightning.optional import optional
from stapo_lightning.prompt import Prompt

# Rows that stand in memory as Python objects at a time.
_BATCH = 10_000


class ParquetPrompts(PromptSource):
    """Problems from Parquet files. Rows are numbered from 1; only the named columns are read.

    Every rank reads all rows and keeps the distinct problems: about half a minute for the 1.8 million rows of
    DAPO-Math-17k, where each problem is repeated a hundred times.

    Args:
        path: A file, relative to the working directory, or a pattern such as data/*.parquet, read in alphabetical
            order.
        columns: Where a row holds what. The layout of the RL community is prompt: prompt, answer:
            reward_model.ground_truth, source: data_source.
        wording: The words around each problem, and whether the policy's chat template is applied.
        name: Source of the rows that name none: evaluation reports one line a source.
        conflicts: Rows that ask the same with different answers: "error", or "drop" leaves such problems out with a
            count, as none of the answers can be trusted. Rows that repeat the answer as well are dropped with a count.

    """

    def __init__(
        self,
        path: str,
        columns: Columns = Columns(),
        wording: Wording = Wording(),
        name: str = "",
        conflicts: Conflicts = "error",
    ) -> None:
        self.path = path
        self.columns = columns
        self.wording = wording
        self.name = name
        self.conflicts = conflicts

    def load(self) -> Sequence[Prompt]:
        collector = PromptCollector(self.columns, self.wording, self.name, self.conflicts)
        paths, problems = matching(self.path)
        if problems:
            raise ConfigError(problems)
        for path in paths:
            self._read(path, collector)
        prompts, self.remarks = collector.finish()
        return prompts

    def _read(self, path: str, collector: PromptCollector) -> None:
        arrow = optional("pyarrow", "data", "ParquetPrompts")
        parquet = optional("pyarrow.parquet", "data", "ParquetPrompts")
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                missing = self.columns.missing(names)
                for problem in missing:
                    collector.complain(path, problem)
                if missing:
                    return
                number = 0
                for batch in file.iter_batches(_BATCH, columns=self.columns.top_level(names)):
                    for row in batch.to_pylist():
                        number += 1
                        collector.add(path, number, row)
        except (arrow.ArrowException, OSError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            collector.complain(path, f"no readable Parquet file ({reason}); expected one")
