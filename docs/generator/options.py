"""The table of all options."""

from exporter.config import FACTS, OPTIONS, Option
from exporter.config.options import options_of
from exporter.config.sections import DnsTargetsConfig, FileTargetsConfig, in_file
from exporter.config.showing import default_text

__all__ = ["options_table"]


def options_table() -> str:
    """Return a Markdown table of all options, and of the facts that a target's `config` may hold."""
    lines = [_row("key in the file", "flag", "environment", "default", "help", "value"), "|---" * 6 + "|"]
    for row in OPTIONS:
        flag = f"`{row.flag}`" if row.has_flag else "-"
        env = f"`{row.env}`" if row.has_env else "-"
        lines.append(_of(row, in_file(row.key), flag, env))
    lines += [_of(row, row.key) for row in options_of(DnsTargetsConfig, "targets_dns[0].")]
    lines += [_of(row, row.key) for row in options_of(FileTargetsConfig, "targets_file_sd[0].")]
    lines += [_of(fact, f"targets[0].config.{fact.key}") for fact in FACTS.values()]
    return "\n".join(lines) + "\n"


def _of(row: Option, key: str, flag: str = "-", env: str = "-") -> str:
    return _row(f"`{key}`", flag, env, default_text(row), row.help, row.kind.wanted)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
