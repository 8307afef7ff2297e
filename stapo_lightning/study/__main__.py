"""`python -m stapo_lightning.study`."""

from stapo_lightning.study.cli import main

if __name__ == "__main__":
    main()
