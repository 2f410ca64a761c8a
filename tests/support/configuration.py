"""Loads configurations from texts."""

import pytest

from exporter.config import ConfigError, load

HIDDEN = "s3cr3t-Value"


def no_file(path):
    """Replace a disk that must not be read."""
    raise AssertionError(f"unexpected read of {path}")


def from_file(text, flags=None, environ=None):
    """Load a configuration whose file holds `text`."""
    files = {"/etc/exporter.yaml": text}
    return load({"config.file": "/etc/exporter.yaml", **(flags or {})}, environ or {}, files.__getitem__)


def problems_of(text, flags=None, environ=None):
    """Return the problems of a configuration."""
    with pytest.raises(ConfigError) as caught:
        from_file(text, flags, environ)
    return list(caught.value.problems)


def target_of(lines):
    """Load a file with one target, described by one line of YAML."""
    return from_file(f"targets: [{{{lines}}}]").targets[0]
