"""The index in OpenSearch, for more documents than one machine holds."""
