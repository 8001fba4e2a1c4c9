"""Where passages come from."""
