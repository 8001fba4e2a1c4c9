"""Language processing shared by search, answers and ranking: words, sentences, support scores, translations."""
