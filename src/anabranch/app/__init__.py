"""The composition root: settings become a running Anabranch. Nothing else constructs."""

from anabranch.app.anabranch import Anabranch

__all__ = ["Anabranch"]
