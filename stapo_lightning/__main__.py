"""`python -m stapo_lightning`: the same as `stapo`."""

from stapo_lightning.cli import main

main()
