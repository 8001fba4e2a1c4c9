"""The command line."""

from anabranch.entrypoints.cli.main import main

__all__ = ["main"]
