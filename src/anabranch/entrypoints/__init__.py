"""How the outside reaches the river: HTTP and the command line."""
