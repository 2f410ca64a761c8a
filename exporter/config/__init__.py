"""The configuration: the one table of options, and how it is loaded from flags, environment and a YAML file.

To add an option add a line to one of the dataclasses in ``sections.py``; flag, environment variable, key in
the file, checks and `describe` follow from it. ``options.py`` explains how.
"""

from exporter.config.facts import FACTS, Fact, as_number, parse_facts, seat_limit
from exporter.config.kinds import read_url
from exporter.config.loading import load
from exporter.config.options import ConfigError, Option, Secret
from exporter.config.sections import (
    OPTIONS,
    AccessConfig,
    AlertmanagerConfig,
    AnalysisConfig,
    BasicAuthConfig,
    Config,
    DnsTargetsConfig,
    EngineConfig,
    FileTargetsConfig,
    LogConfig,
    PollConfig,
    TargetConfig,
    TlsConfig,
    WebConfig,
    WebFileConfig,
    WhatIfConfig,
)
from exporter.config.showing import add_flags, describe, flags_given

__all__ = [
    "FACTS", "OPTIONS", "AccessConfig", "AlertmanagerConfig", "AnalysisConfig", "BasicAuthConfig",
    "Config", "ConfigError", "DnsTargetsConfig", "EngineConfig", "Fact", "FileTargetsConfig",
    "LogConfig", "Option", "PollConfig", "Secret", "TargetConfig", "TlsConfig", "WebConfig",
    "WebFileConfig", "WhatIfConfig", "add_flags", "as_number", "describe", "flags_given", "load",
    "parse_facts", "read_url", "seat_limit",
]  # fmt: skip
