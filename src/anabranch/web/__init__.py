"""The API page and the JavaScript client, served as static files."""
