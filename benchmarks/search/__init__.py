"""Search over many chunks, side by side with other engines, on the same texts and the same vectors."""
