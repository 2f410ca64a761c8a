"""Loads the configuration from flags, the environment and a file; reports all problems at once."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from exporter.config import kinds
from exporter.config.options import (
    ENV_PREFIX,
    ConfigError,
    Option,
    Refused,
    Section,
    attempt,
    read_section,
    read_yaml,
    shape,
    unknown,
)
from exporter.config.sections import (
    BY_ENV,
    BY_KEY,
    FILE,
    Config,
    DnsTargetsConfig,
    FileTargetsConfig,
    TargetConfig,
    in_file,
)

__all__ = ["load"]

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Kubernetes sets these in every pod of a namespace with a service called vllm-pressure-something.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)=|_PORT=(tcp|udp|sctp)://"
)


def load(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    read_file: Callable[[str], str],
    only: str | None = None,
) -> Config:
    """Load the configuration: flags override the environment, which overrides the file.

    Args:
        flags: values by key (``web.listen_address``, and ``config.file``); None for a flag not given.
        environ: the environment; an empty variable counts as not set.
        read_file: returns the text of a file; may raise OSError or ValueError.
        only: the url of the one server that is wanted, instead of all in the file. If the file has it, the
            file's options for it apply.

    Raises:
        ConfigError: with every problem of every source.
    """
    problems: list[str] = []
    over, spelled = _overlay(flags, environ, problems)
    path = over.pop(FILE.key, None)
    tree = _read_tree(path, read_file, problems)
    target_over = {
        key.removeprefix("target."): over.pop(key) for key in list(over) if key.startswith("target.")
    }
    if tree.get("targets") is not None and target_over:
        names = ", ".join(spelled[f"target.{key}"] for key in target_over)
        problems.append(f"targets: the target is also given by {names}; expected one place only")
    dns = _read_list(DnsTargetsConfig, tree.pop("targets_dns", None), "targets_dns", problems)
    files = _read_list(FileTargetsConfig, tree.pop("targets_file_sd", None), "targets_file_sd", problems)
    targets = _read_targets(tree.pop("targets", None), target_over, problems, found=bool(dns or files))
    if only is not None:
        targets, dns, files = (_chosen(only, targets, target_over, problems),), (), ()
    config, _ = read_section(Config, tree, "", over, problems)
    labels = _expand(config.alertmanager.external_labels, environ, problems)
    if problems:
        raise ConfigError(problems)
    return replace(
        config,
        targets=targets,
        targets_dns=dns,
        targets_file_sd=tuple(_beside(path, one) for one in files),
        alertmanager=replace(config.alertmanager, external_labels=labels),
    )


def _beside(path: object, files: FileTargetsConfig) -> FileTargetsConfig:
    """File names are relative to the folder of the configuration file, as in Prometheus."""
    folder = os.path.dirname(path) if isinstance(path, str) else ""  # noqa: PTH120 (may hold a pattern)
    return replace(files, files=tuple(os.path.join(folder, name) for name in files.files))  # noqa: PTH118


def _chosen(
    url: str, targets: tuple[TargetConfig, ...], over: Mapping[str, object], problems: list[str]
) -> TargetConfig:
    """The one server that is wanted, with the file's options for it."""
    read = attempt(kinds.URL, url, BY_KEY["target.url"].flag, problems)
    for target in targets:
        if target.url == read:
            return replace(target, labels={})
    return read_section(TargetConfig, None, "target.", {**over, "url": read}, problems)[0]


def _expand(labels: Mapping[str, str], environ: Mapping[str, str], problems: list[str]) -> Mapping[str, str]:
    """Replace ``${NAME}`` in labels with the environment's values; a label without a value is left out."""
    missing = {
        f"alertmanager.external_labels.{label}: expected {name} in the environment, got nothing"
        for label, value in labels.items()
        for name in _VARIABLE.findall(value)
        if name not in environ
    }
    problems += sorted(missing)
    filled = {name: _VARIABLE.sub(lambda found: environ.get(found[1], ""), labels[name]) for name in labels}
    known = {name: value for name, value in filled.items() if value}
    return attempt(kinds.LABELS, known, "alertmanager.external_labels", problems) or {}


def _overlay(
    flags: Mapping[str, str | None], environ: Mapping[str, str], problems: list[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Read environment and flags: values by key (`Refused` for an invalid one), and how each was spelled."""
    over: dict[str, object] = {}
    spelled: dict[str, str] = {}
    for key, name, raw in (*_from_environ(environ, problems), *_from_flags(flags, problems)):
        value = attempt(BY_KEY[key].kind, raw, name, problems)
        over[key] = Refused() if value is None else value
        spelled[key] = name
    return over, spelled


def _from_environ(environ: Mapping[str, str], problems: list[str]) -> Iterator[tuple[str, str, str]]:
    for name, raw in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or not raw:
            continue
        row = BY_ENV.get(name)
        if row is not None and row.has_env:
            yield row.key, name, raw
        elif row is not None:
            problems.append(f"{name}: {_only_in_file(row)}")
        elif not _SERVICE_LINK.search(f"{name}={raw}"):
            problems.append(unknown(name, BY_ENV))


def _from_flags(flags: Mapping[str, str | None], problems: list[str]) -> Iterator[tuple[str, str, str]]:
    for key, raw in flags.items():
        row = BY_KEY.get(key)
        if raw is None:
            continue
        if row is None:
            problems.append(unknown(key, BY_KEY))
        elif row.has_flag:
            yield key, row.flag, raw
        elif row.has_env:
            problems.append(
                f"{row.flag}: everybody can see a secret among arguments; expected it in {row.env}"
            )
        else:
            problems.append(f"{row.flag}: {_only_in_file(row)}")


def _only_in_file(row: Option) -> str:
    return f"expected {in_file(row.key)} in the file; only a file can hold a mapping"


def _read_tree(path: object, read_file: Callable[[str], str], problems: list[str]) -> dict[str, object]:
    if not isinstance(path, str):
        return {}
    try:
        text = read_file(path)
    except OSError as error:
        problems.append(f"{path}: expected a readable file, got {(error.strerror or 'an error').lower()}")
        return {}
    except ValueError:
        problems.append(f"{path}: expected a readable file of utf-8 text, got something else")
        return {}
    tree, found = read_yaml(text, path)
    problems += found
    return tree


def _read_targets(
    given: object, over: Mapping[str, object], problems: list[str], *, found: bool
) -> tuple[TargetConfig, ...]:
    """Read the listed targets; with discovery (`found`) there may be none."""
    if given is None:
        alone = read_section(TargetConfig, None, "target.", over, problems)[0]
        return () if found and not over else (alone,)
    if given == [] and not found:
        problems.append("targets: expected a target, got none (remove the key to watch the default)")
    targets = _read_list(TargetConfig, given, "targets", problems)
    seen: dict[object, int] = {}
    for index, target in enumerate(targets):
        where = (target.url, target.unix_socket, tuple(sorted(target.labels.items())))
        if (first := seen.setdefault(where, index)) != index:
            problems.append(f"targets[{index}]: the same as targets[{first}]; expected each once")
    return targets


_Listed = TypeVar("_Listed", bound=Section)
_EXAMPLES = {"targets": "url", "targets_dns": "name", "targets_file_sd": "files"}


def _read_list(kind: type[_Listed], given: object, key: str, problems: list[str]) -> tuple[_Listed, ...]:
    """Read a list of sections."""
    if given is None:
        return ()
    if not isinstance(given, list):
        problems.append(f"{key}: expected a list such as [{{{_EXAMPLES[key]}: ...}}], got {shape(given)}")
        return ()
    for index, item in enumerate(given):
        if item is None:
            problems.append(f"{key}[{index}]: expected a mapping of options, got nothing")
    return tuple(
        read_section(kind, item, f"{key}[{index}].", {}, problems)[0]
        for index, item in enumerate(given)
        if item is not None
    )
