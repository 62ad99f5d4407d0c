"""The decoder as pure functions of plain parameter dicts, its caches and heads."""
