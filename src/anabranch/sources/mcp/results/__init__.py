"""Finding results in the replies of MCP servers."""
