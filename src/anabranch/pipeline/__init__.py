"""The pipeline: its stages, their order, and the Run that owns one execution."""
