"""Who writes."""
