"""Tokenizers that are trained for tests."""

import io


def train_bytes_pairs(texts, special_tokens):
    """A byte-level byte-pair tokenizer of the package `tokenizers`, of up to 400 tokens."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special_tokens,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_pieces(path, texts, **options):
    """Writes a byte-pair model of sentencepiece, which keeps text unless options say otherwise."""
    import sentencepiece

    content = io.BytesIO()
    defaults = {"model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    defaults |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=content, **defaults | options
    )
    path.write_bytes(content.getvalue())
