"""`python -m hpo`."""

from hpo.cli import main

main()
