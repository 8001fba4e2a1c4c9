"""The entrypoints: HTTP, the command line and the MCP server."""
