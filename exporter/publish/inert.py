"""Keeps a terminal safe from foreign text."""

__all__ = ["inert", "inert_lines"]


def inert(text: str) -> str:
    """Escape control characters, which a terminal would obey: names come from the server."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def inert_lines(text: str) -> str:
    """Escape control characters in each line of a text; its line feeds stay."""
    return "\n".join(map(inert, text.split("\n")))
