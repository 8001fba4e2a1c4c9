"""The HTTP surfaces: one module per dialect, one table of errors."""
