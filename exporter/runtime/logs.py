"""The format of log lines: logfmt or JSON, on standard error."""

import json
import logging
import sys
import time

__all__ = ["set_up"]


class _Formatter(logging.Formatter):
    """Formats a line as ``logfmt``, or as ``json``."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._form == "json":
            return json.dumps(fields, ensure_ascii=False)
        return " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())


def set_up(level: str, form: str) -> None:
    """Send log lines from this level on to standard error, as ``logfmt`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(form))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def _quoted(value: str) -> str:
    plain = value and not any(letter in ' "=\\' or letter < " " for letter in value)
    return value if plain else json.dumps(value, ensure_ascii=False)
