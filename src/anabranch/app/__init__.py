"""The composition root and the use cases."""
