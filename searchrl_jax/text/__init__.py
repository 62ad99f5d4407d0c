"""Text as tokens: tokenizers, and the chat dialects in which tools are called. Host code, no jax."""
