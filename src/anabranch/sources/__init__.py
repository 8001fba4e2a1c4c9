"""Sources of passages: SyftAI-Space endpoints, collections, MCP servers."""
