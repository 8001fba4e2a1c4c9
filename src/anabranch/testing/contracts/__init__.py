"""Contract suites: test classes that every implementation of a domain contract must pass. They need pytest."""
