"""Measurements of Anabranch next to the fastest and the usual way of writing the same service."""
