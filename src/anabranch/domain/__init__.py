"""Values, events, errors and contracts; no framework, and nothing of ours is imported."""
