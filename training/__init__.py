"""How the evidence model is made: data, training, evaluation, export. Not part of the product."""
