"""What in the passages answers a question, judged by the evidence model together with rules."""
