"""The derived index: segments of vectors and postings, generations of them, and the reader that searches both."""
