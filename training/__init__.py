"""Training of the evidence model: data, model, evaluation, export. Not part of the installed package."""
