"""Logs, metrics, traces and breadcrumbs."""
