"""Views of corpora, groups, and copies: what knows what a corpus is, and not how one is stored."""
