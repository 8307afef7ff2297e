"""`python -m stapo_lightning.compare`: the same as `stapo-compare`."""

from stapo_lightning.compare.cli import main

main()
