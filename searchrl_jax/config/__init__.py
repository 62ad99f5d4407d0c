"""What a run is told: frozen dataclasses with checked fields, overrides by dotted name, and the command line."""
