"""Test suites for implementations of a contract: subclass one in a pytest module and define its fixture."""
