"""Names of Prometheus' labels."""

import re
from typing import Final

__all__ = ["LABEL_NAME", "is_label_name"]

LABEL_NAME: Final = "[a-zA-Z_][a-zA-Z0-9_]*"
"""The pattern of a label's name."""


def is_label_name(text: str) -> bool:
    """Whether a text may be the name of a label."""
    return re.fullmatch(LABEL_NAME, text) is not None
