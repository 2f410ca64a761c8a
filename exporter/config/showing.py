"""Shows the configuration: as flags with their help, and as a file."""

import argparse
from collections.abc import Collection
from dataclasses import fields
from typing import Any

import yaml

from exporter.config.options import BOOLEAN, Option, plain
from exporter.config.sections import BY_KEY, FILE, OPTIONS, Config, TargetConfig

__all__ = ["add_flags", "default_text", "describe", "flags_given"]

# The sections' descriptions in the help.
_SECTIONS = {
    "target": TargetConfig.__doc__,
    **{each.name: each.metadata["section"].__doc__ for each in fields(Config) if "section" in each.metadata},
}


class _HelpAll(argparse.Action):
    """Prints the help with the options that ``--help`` leaves out: `const` has each with its text."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self.const:
            action.help = text
        for group in parser._action_groups:  # noqa: SLF001 (argparse has no other way to them)
            group.description = _SECTIONS.get(group.title or "", group.description)
        parser.print_help()
        parser.exit()


def add_flags(parser: argparse.ArgumentParser, shown: Collection[str] | None = None) -> None:
    """Add ``--config.file`` and the flag of every option.

    Each section is a group of its own in the help. Defaults stay None, so that `load` knows which flags were
    given; it also checks the values. Abbreviations are off: ``--target.bearer-token X`` would set
    ``--target.bearer-token-file``.

    Args:
        parser: of a command.
        shown: keys of the options that ``--help`` shows, all by default; ``--help-all`` shows the others too.
    """
    parser.allow_abbrev = False
    hidden: list[tuple[argparse.Action, str]] = []
    groups: dict[str, argparse._ArgumentGroup] = {}
    for row in (FILE, *OPTIONS):
        section_name = row.key.partition(".")[0]
        if section_name not in groups:
            about = _SECTIONS.get(section_name) if shown is None else None
            groups[section_name] = parser.add_argument_group(section_name, about)
        text = f"{row.help} (default: {default_text(row)}; environment: {row.env})"
        # A flag that load() rejects is still parsed: argparse would repeat an unknown flag with its secret.
        usage = text.replace("%", "%%") if row.has_flag else argparse.SUPPRESS
        metavar = row.kind.name if "|" in row.kind.name else row.kind.name.upper()
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if row.kind is BOOLEAN else {}
        action = groups[section_name].add_argument(
            row.flag, dest=row.key, metavar=metavar, default=None, help=usage, **switch
        )
        if shown is not None and row is not FILE and row.key not in shown:
            hidden.append((action, usage))
            action.help = argparse.SUPPRESS
    if hidden:
        parser.add_argument(
            "--help-all", action=_HelpAll, nargs=0, const=hidden, help="show all options of the configuration"
        )


def flags_given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the values of the flags of `add_flags`, in the form that `load` takes."""
    return {key: value for key in BY_KEY if (value := getattr(arguments, key, None)) is not None}


def default_text(row: Option) -> str:
    """The default of an option as a text; ``none`` without one."""
    if row.default is None or row.default in ({}, (), ""):
        return "none"
    value = row.kind.show(row.default)
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(config: Config) -> str:
    """Return the configuration as an equivalent YAML file, with secrets masked."""
    names = ("targets", "targets_dns", "targets_file_sd")
    listed = {name: [plain(one) for one in getattr(config, name)] for name in names if getattr(config, name)}
    return yaml.safe_dump({**listed, **plain(config)}, sort_keys=False, allow_unicode=True, width=1000)
