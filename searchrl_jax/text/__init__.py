"""Text as tokens: the byte-level tokenizer and the chat dialect in which tools are called. Host code, no jax."""
