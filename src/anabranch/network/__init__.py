"""Outbound HTTP, address checks, server-sent events, the SyftAI-Space wire and the hub."""
