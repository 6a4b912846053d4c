"""Entry point of ``python -m specray.cli``."""

from specray.cli import main

main()
