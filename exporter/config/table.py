"""All options in one table, as flags, environment and file know them."""

from exporter.config.options import TEXT, Option, options_of
from exporter.config.sections import Config, DnsTargetsConfig, FileTargetsConfig, TargetConfig

__all__ = ["BY_ENV", "BY_KEY", "FILE", "FOUND", "OPTIONS", "in_file"]

OPTIONS: tuple[Option, ...] = (*options_of(TargetConfig, "target."), *options_of(Config, ""))

# What discovery takes; only a file can hold it.
FOUND: tuple[Option, ...] = (
    *options_of(DnsTargetsConfig, "targets_dns[0]."),
    *options_of(FileTargetsConfig, "targets_file_sd[0]."),
)

FILE = Option("config.file", TEXT, None, "YAML file with options; flags and environment go before it")

BY_KEY = {row.key: row for row in (FILE, *OPTIONS)}
BY_ENV = {row.env: row for row in (FILE, *OPTIONS)}


def in_file(key: str) -> str:
    """How the file spells a key: there a target is one of several."""
    return key.replace("target.", "targets[0].", 1) if key.startswith("target.") else key
