"""What every other layer may use: plain arithmetic and conventions that depend on nothing else in the package."""
