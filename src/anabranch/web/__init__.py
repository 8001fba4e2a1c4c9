"""The web page and its files, served as they are."""
