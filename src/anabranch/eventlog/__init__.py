"""The event log: ordered streams with one writer and many readers, in memory and in Redis."""
