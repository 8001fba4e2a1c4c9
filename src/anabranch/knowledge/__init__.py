"""Collections: documents are parsed, chunked, embedded, indexed and searched. The index is derived from the records."""
