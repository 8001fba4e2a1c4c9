"""Converts what each kind of subagent sends into one format (spec 2)."""
