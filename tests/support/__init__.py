"""Servers, clients and fixtures that several test modules share."""
