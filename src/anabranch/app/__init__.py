"""The composition root and the use cases."""

from anabranch.app.anabranch import Anabranch

__all__ = ["Anabranch"]
