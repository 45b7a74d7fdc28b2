"""GGUF files: container, metadata and tokenizer."""
