"""The calls that OpenAI's clients make: from a body to tokens and back."""
