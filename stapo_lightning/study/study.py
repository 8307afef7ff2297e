"""What a study is: regimes x methods x seeds, each a run of `stapo fit`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stapo_lightning.errors import ConfigError, bounded


@dataclass(frozen=True)
class Regime:
    """What all methods share: task, policy, rates, sizes.

    Attributes:
        name: Its name in folders, tables and figures.
        configs: Config files of `stapo fit`, each over the one before it.

    """

    name: str
    configs: list[str]


@dataclass(frozen=True)
class Method:
    """What is compared.

    Attributes:
        name: Its name in folders, tables and figures.
        group: The table that it stands in.
        configs: Config files over the regime's.
        options: Options of `stapo fit` over all files, such as --model.kl_coef=0.01.
        seeds: Values of --seed_everything. A seed has the same prompts, sampling streams and held-out problems with
            every method.
        regimes: Names of the regimes it runs in; null takes all.
        drawn: Whether its curves are in the figure of curves.

    """

    name: str
    group: str
    configs: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    regimes: list[str] | None = None
    drawn: bool = False


@dataclass(frozen=True)
class PlannedRun:
    """One run of the study.

    Attributes:
        regime: Name of its regime.
        method: Name of its method.
        seed: Its seed.
        folder: Where it logs: <folder>/<regime>/<method>/seed_<seed>.
        options: The whole command line of `stapo fit`.

    """

    regime: str
    method: str
    seed: int
    folder: Path
    options: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.regime} / {self.method} / seed {self.seed}"

    @property
    def command(self) -> str:
        """The line that makes this run by itself."""
        return " ".join(["stapo fit", *(f"'{o}'" if " " in o else o for o in self.options)])

    def fingerprint(self) -> str:
        """Changes whenever the options or the text of a config file do."""
        texts = [Path(o.removeprefix("--config=")).read_text() for o in self.options if o.startswith("--config=")]
        return hashlib.sha256("\0".join([*self.options, *texts]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """Regimes x methods x seeds.

    Attributes:
        regimes: At least one.
        methods: At least one; tables and figures keep their order.
        reference: Name of the method that the others are compared with, seed by seed.
        accuracy: Tag of the held-out accuracy, such as val/arithmetic/sampled/avg@1.
        folder: Where the runs go.
        warmup_updates: Updates of warm-up, which the entropy "after warm-up" leaves out.
        window: Updates that an entropy is averaged over, at least 1.

    """

    regimes: list[Regime]
    methods: list[Method]
    reference: str
    accuracy: str
    folder: str
    warmup_updates: int = 10
    window: int = 20

    def problems(self) -> list[str]:
        """Everything that is wrong with it, one sentence each."""
        found = bounded("study.warmup_updates", self.warmup_updates, at_least=0)
        found += bounded("study.window", self.window, at_least=1)
        regimes, methods = [r.name for r in self.regimes], [m.name for m in self.methods]
        for kind, names in (("regimes", regimes), ("methods", methods)):
            found += [f"study.{kind}: give at least one"] if not names else []
            found += [f"study.{kind}: {n!r} is there twice" for n in dict.fromkeys(names) if names.count(n) > 1]
            found += [f"study.{kind}: {n!r} is no name of a folder; leave the / out" for n in names if "/" in n]
        if self.reference not in methods:
            found.append(f"study.reference={self.reference}: no method of that name; there are {', '.join(methods)}")
        for method in self.methods:
            unknown = [name for name in method.regimes or [] if name not in regimes]
            found += [f"{method.name}.regimes: no regime {name!r}; there are {', '.join(regimes)}" for name in unknown]
            if len(set(method.seeds)) < len(method.seeds) or not method.seeds:
                found.append(f"{method.name}.seeds={method.seeds}: give at least one, each once")
        files = [f for regime in self.regimes for f in regime.configs]
        files += [f for method in self.methods for f in method.configs]
        missing = [file for file in dict.fromkeys(files) if not Path(file).is_file()]
        return found + [f"{file}: no such config file below {Path.cwd()}" for file in missing]

    def runs(self) -> list[PlannedRun]:
        """Every run, the first seed of all methods first: a study that is cut off has compared all of them.

        Raises:
            ConfigError: With every problem at once.

        """
        if found := self.problems():
            raise ConfigError(found)
        seeds = list(dict.fromkeys(seed for method in self.methods for seed in method.seeds))
        return [
            self._run(regime, method, seed)
            for seed in seeds
            for regime in self.regimes
            for method in self.methods
            if seed in method.seeds and (method.regimes is None or regime.name in method.regimes)
        ]

    def _run(self, regime: Regime, method: Method, seed: int) -> PlannedRun:
        root = Path(self.folder) / regime.name
        options = [
            *(f"--config={file}" for file in [*regime.configs, *method.configs]),
            *method.options,
            f"--seed_everything={seed}",
            f"--trainer.logger.init_args.save_dir={root}",
            f"--trainer.logger.init_args.name={method.name}",
            f"--trainer.logger.init_args.version=seed_{seed}",
        ]
        return PlannedRun(regime.name, method.name, seed, root / method.name / f"seed_{seed}", tuple(options))


def in_regime(runs: Sequence[PlannedRun], regime: str) -> list[PlannedRun]:
    """The runs of one regime."""
    return [run for run in runs if run.regime == regime]
