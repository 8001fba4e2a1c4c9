"""`python -m anabranch`."""

from anabranch.entrypoints.cli import main

main()
