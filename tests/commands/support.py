"""What the tests of several commands ask of a text."""

from collections.abc import Container


def absent(text: Container[str], *parts: str) -> list[str]:
    """Those of these parts that are not in a text, or not among lines."""
    return [part for part in parts if part not in text]
