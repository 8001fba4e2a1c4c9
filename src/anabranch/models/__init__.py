"""Language models, embedders and rerankers: one module per kind."""
