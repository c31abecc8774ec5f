"""The contract tests for drivers, shipped for authors of drivers in other packages. Needs pytest."""
