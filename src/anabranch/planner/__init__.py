"""Planner steps: the state machine, its subagents, and the coordinator that runs them."""
