"""The event log shared by workers through Redis."""
