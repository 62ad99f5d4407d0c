"""What a run would cost on chips that aren't here: programs compiled ahead of time for them, and read."""
