"""JSON as every reader takes it: numbers that it lacks, infinities and NaN, become null."""

import json
import math
from typing import Any

__all__ = ["json_text"]


def json_text(document: Any, **options: Any) -> str:
    """Return a document as JSON; `options` are those of `json.dumps`."""
    try:
        return json.dumps(document, allow_nan=False, **options)
    except ValueError:  # a server can make any quotient overflow; it must not take the other servers' away
        return json.dumps(_finite(document), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
