"""How right the answers without a language model are, and whether it is known when there is none."""
