"""Questions about technical documentation, made from the structure of the documentation of eight packages."""
