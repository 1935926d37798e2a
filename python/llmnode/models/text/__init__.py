"""Tokens and text: tokenizers, streaming, chat templates."""
