"""MCP's server side: three tools, over HTTP and over standard input and output. What is in here loads MCP's SDK."""
