"""The records: the SQLite database that everything else is derived from. Only this package runs SQL."""
