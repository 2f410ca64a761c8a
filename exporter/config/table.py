"""All options in one table, by key and by environment variable."""

from exporter.config.options import TEXT, Option, options_of
from exporter.config.sections import Config, TargetConfig

__all__ = ["BY_ENV", "BY_KEY", "FILE", "OPTIONS", "in_file"]

OPTIONS: tuple[Option, ...] = (*options_of(TargetConfig, "target."), *options_of(Config, ""))

FILE = Option("config.file", TEXT, None, "YAML file with options; flags and environment override it")

BY_KEY = {row.key: row for row in (FILE, *OPTIONS)}
BY_ENV = {row.env: row for row in (FILE, *OPTIONS)}


def in_file(key: str) -> str:
    """The key as the file spells it: there a target is one of several."""
    return key.replace("target.", "targets[0].", 1) if key.startswith("target.") else key
