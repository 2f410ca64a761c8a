"""The format of log lines: logfmt or JSON, on standard error."""

import json
import logging
import sys
import time
from typing import Final

__all__ = ["set_up"]


class _Formatter(logging.Formatter):
    """Collects the fields of a line, in order."""

    def _fields(self, record: logging.LogRecord) -> dict[str, str]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return fields


class _Logfmt(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_quoted(value)}" for name, value in self._fields(record).items())


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self._fields(record), ensure_ascii=False)


_FORMATS: Final = {"logfmt": _Logfmt, "json": _Json}


def set_up(level: str, form: str) -> None:
    """Send all log lines to standard error.

    Args:
        level: lowest level that is logged: ``debug``, ``info``, ``warning`` or ``error``.
        form: ``logfmt`` or ``json``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_FORMATS[form]())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def _quoted(value: str) -> str:
    plain = value and not any(letter in ' "=\\' or letter < " " for letter in value)
    return value if plain else json.dumps(value, ensure_ascii=False)
