"""Our MCP server: three tools over HTTP and stdio. This package imports the MCP SDK."""
