"""Collections: parsed, cut, embedded, indexed, searched; the records are the truth and the index is derived."""
