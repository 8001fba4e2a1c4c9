"""The Redis client and request/reply between workers over Redis pub/sub."""
