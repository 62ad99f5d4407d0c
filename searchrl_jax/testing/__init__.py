"""Tiny models, documents and environments, for tests that need the whole chain in seconds."""
