"""Spec 2's adapters: what each kind of subagent sends, put into one form."""
