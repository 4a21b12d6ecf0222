"""Records to tokens: sources, templates, tokenizers."""
