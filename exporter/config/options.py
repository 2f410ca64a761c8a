"""How an option is described, read and shown. The options themselves are in ``sections.py``.

An option is one line in a dataclass: ``window: float = option(60.0, duration(1, 3600), "span of rates")``.
The field has a type, and its name, default, kind and help are each written once.
Flags, environment and file are all read as text by the same `Kind`, so that a value means the same in each.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import yaml

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
N = TypeVar("N", int, float)
S = TypeVar("S", bound="Section")

ENV_PREFIX = "VLLM_PRESSURE_"
MASK = "<secret>"

_SHOWN = 80  # characters of a rejected value that an error repeats
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_WHOLE = re.compile(r"[-+]?[0-9]{1,20}")
_NUMBER = re.compile(r"[-+.0-9eE]{1,40}")
_DURATION = re.compile(r"([.0-9]+(?:[eE][-+]?[0-9]+)?)(ms|s|m|h|)")
_SIZE = re.compile(r"([0-9]{1,20})(B|KiB|MiB|GiB|TiB|)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0, "ms": 0.001}
_BYTES = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1, "": 1}


class Secret:
    """A text that is never printed: only `reveal` returns it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the text itself, for the code that sends it."""
        return self._value

    def __repr__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))


class ConfigError(ValueError):
    """An invalid configuration: all `problems`, each with the path of its key."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(self.problems))


class Refused(Exception):  # noqa: N818 - not an error of the program; becomes lines of a ConfigError
    """A value was rejected. Each of `endings` follows its path in the message (``: expected ...``)."""

    def __init__(self, *endings: str) -> None:
        self.endings = endings
        super().__init__(*endings)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T_co]):
    """A kind of value: its `name` in usage texts, the `wanted` value in words, its reader and its printer.

    `read` takes text, number or boolean (`structured`: a mapping) and returns the value or raises `Refused`.
    `show` turns the value into what a configuration file would hold, with secrets masked.
    """

    name: str
    wanted: str
    read: Callable[[object], T_co]
    show: Callable[[Any], object] = lambda value: value
    secret: bool = False
    structured: bool = False


def shape(raw: object) -> str:
    """Name the shape of a value without repeating it; it may hold a secret."""
    names = {type(None): "nothing", str: "text", dict: "a mapping", list: "a list"}
    return names.get(type(raw), "something else")


def _as_text(raw: object) -> str | None:
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, int | float):
        try:
            return repr(raw)
        except ValueError:  # Python refuses to print integers of thousands of digits
            return None
    return raw if isinstance(raw, str) else None


def scalar(
    name: str,
    wanted: str,
    convert: Callable[[str], T],
    show: Callable[[Any], object] = lambda value: value,
    *,
    secret: bool = False,
) -> Kind[T]:
    """Make a kind from a function that turns a text into a value, or raises ValueError or `Refused`."""

    def read(raw: object) -> T:
        text = _as_text(raw)
        if text is None:
            raise Refused(f": expected {wanted}, got {shape(raw)}")
        try:
            return convert(text)
        except ValueError:
            got = "something else" if secret else repr(text[:_SHOWN])
            raise Refused(f": expected {wanted}, got {got}") from None

    return Kind(name, wanted, read, show, secret)


def _within(value: N, low: float, high: float) -> N:
    if not low <= value <= high:
        raise ValueError
    return value


def matched(regex: str | re.Pattern[str], text: str) -> re.Match[str]:
    """Match a text as a whole, or raise ValueError."""
    found = re.fullmatch(regex, text)
    if found is None:
        raise ValueError
    return found


def pattern(name: str, wanted: str, regex: str) -> Kind[str]:
    """Make the kind of texts that a regular expression matches as a whole."""
    return scalar(name, wanted, lambda text: matched(regex, text)[0])


def whole(low: int, high: int) -> Kind[int]:
    """Make the kind of integers from `low` to `high`."""
    wanted = f"a whole number from {low} to {high}"
    return scalar("integer", wanted, lambda text: _within(int(matched(_WHOLE, text)[0]), low, high))


def number(low: float, high: float) -> Kind[float]:
    """Make the kind of finite numbers from `low` to `high`."""
    wanted = f"a number from {low:g} to {high:g}"
    return scalar("number", wanted, lambda text: _within(float(matched(_NUMBER, text)[0]), low, high))


def duration(low: float, high: float) -> Kind[float]:
    """Make the kind of times in seconds: ``500ms``, ``1.5s``, ``2m``, ``1h``, or a bare number of seconds."""

    def convert(text: str) -> float:
        found = matched(_DURATION, text)
        return _within(float(found[1]) * _SECONDS[found[2]], low, high)

    wanted = f"a duration from {_show_duration(low)} to {_show_duration(high)} (such as 500ms, 10s, 2m, 1h)"
    return scalar("duration", wanted, convert, _show_duration)


def _show_duration(seconds: float) -> str:
    """Show seconds in the largest unit that divides them: ``15m``, ``90s``, ``500ms``, ``1.5s``."""
    for unit in ("h", "m", "s"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{int(seconds / _SECONDS[unit])}{unit}"
    milliseconds = round(seconds * 1000)
    exact = 0 < milliseconds < 1000 and milliseconds * 0.001 == seconds  # noqa: PLR2004 - longer is in seconds
    return f"{milliseconds}ms" if exact else f"{float(seconds)!r}s".replace(".0s", "s")


def size(low: int, high: int) -> Kind[int]:
    """Make the kind of sizes in bytes: an integer, or one with KiB, MiB, GiB or TiB."""

    def convert(text: str) -> int:
        found = matched(_SIZE, text)
        return _within(int(found[1]) * _BYTES[found[2]], low, high)

    wanted = f"a size from {_show_size(low)} to {_show_size(high)} (bytes, or such as 512KiB, 8MiB)"
    return scalar("size", wanted, convert, _show_size)


def _show_size(count: int) -> object:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _BYTES[unit] == 0:
            return f"{count // _BYTES[unit]}{unit}"
    return count


def choice(*names: str) -> Kind[str]:
    """Make the kind of one word out of `names`."""
    return pattern("|".join(names), f"one of {', '.join(names)}", "|".join(map(re.escape, names)))


def _printable(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError
    return text


BOOLEAN = scalar("true|false", "true or false", lambda text: matched("true|false", text.lower())[0] == "true")
TEXT = scalar("text", "a printable text that is not empty", _printable)
SECRET = scalar(
    "secret",
    "a text of visible ASCII characters without spaces",
    lambda text: Secret(matched(r"[!-~]+", text)[0]),
    str,
    secret=True,
)


def entries(
    name: str,
    wanted: str,
    read_entries: Callable[[Mapping[str, object]], tuple[dict[str, T], list[str]]],
    show: Callable[[Any], object],
) -> Kind[Mapping[str, T]]:
    """Make the kind of a mapping. `read_entries` returns what it read and problems, each after its key."""

    def read(raw: object) -> Mapping[str, T]:
        if not isinstance(raw, Mapping):
            # The text is not repeated: ``headers: "Authorization: Bearer ..."`` is a likely slip.
            raise Refused(f": expected {wanted}, got {shape(raw)}")
        values, problems = read_entries(raw)
        if problems:
            raise Refused(*(f".{problem}" for problem in problems))
        return values

    return Kind(name, wanted, read, show, structured=True)


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: dotted key, kind, default and help text."""

    key: str
    kind: Kind[object]
    default: object
    help: str

    @property
    def flag(self) -> str:
        """The flag in Prometheus spelling, ``--web.listen-address``."""
        return "--" + self.key.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable, ``VLLM_PRESSURE_WEB_LISTEN_ADDRESS``."""
        return ENV_PREFIX + self.key.upper().replace(".", "_")

    @property
    def has_flag(self) -> bool:
        """Whether the flag may be given: secrets may not (`ps` shows them), mappings do not fit."""
        return not (self.kind.secret or self.kind.structured)

    @property
    def has_env(self) -> bool:
        """Whether the environment variable may be set: mappings do not fit."""
        return not self.kind.structured


@dataclass(frozen=True, slots=True)
class Section:
    """The base of the dataclasses that make up the configuration."""

    def conflicts(self) -> Iterable[str]:
        """Report values that contradict each other, as ``key: sentence``."""
        return ()


def option(default: T, kind: Kind[T], text: str, *, key: str = "") -> T:
    """Declare a field of a `Section` as an option. `key` is its name in the file if that differs."""
    metadata = {"option": Option(key, kind, default, text)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type[S]) -> S:
    """Declare a field of a `Section` as a section within it."""
    return dataclasses.field(default_factory=kind, metadata={"section": kind})


def _rows(kind: type[Section]) -> dict[str, tuple[str, type[Section] | Option | None]]:
    """List the fields of a section: key -> (field, section or option; None if its owner reads it)."""
    rows: dict[str, tuple[str, type[Section] | Option | None]] = {}
    for field in dataclasses.fields(kind):
        what = field.metadata.get("section") or field.metadata.get("option")
        rows[getattr(what, "key", "") or field.name] = (field.name, what)
    return rows


def options_of(kind: type[Section], prefix: str) -> Iterable[Option]:
    """Yield the options of a section and of all sections in it, with their whole keys."""
    for key, (_, what) in _rows(kind).items():
        if isinstance(what, Option):
            yield dataclasses.replace(what, key=prefix + key)
        elif what is not None:
            yield from options_of(what, f"{prefix}{key}.")


def attempt(kind: Kind[T], raw: object, path: str, problems: list[str]) -> T | None:
    """Read one value; if it is rejected add to `problems` and return None."""
    try:
        return kind.read(raw)
    except Refused as refused:
        problems += [path + ending for ending in refused.endings]
        return None


def unknown(key: str, known: Iterable[str]) -> str:
    """Report an unknown key, and the known one that may have been meant."""
    import difflib  # noqa: PLC0415 (needed for a slip only)

    near = difflib.get_close_matches(key, list(known), n=1)
    shown = key if _WORD.fullmatch(key) else repr(key[:_SHOWN])
    return f"{shown}: unknown key" + (f" (did you mean {near[0]}?)" if near else "")


def read_section(
    kind: type[S], given: object, path: str, over: Mapping[str, object], problems: list[str]
) -> tuple[S, bool]:
    """Build a section from the file's values, overridden by `over`.

    Args:
        kind: the dataclass.
        given: the file's part for it, unchecked; None if the file has none.
        path: prefix of its keys in `problems`, such as ``targets[0].``.
        over: values from flags and environment by key within this section; `Refused` for an invalid one.
        problems: errors are added here.

    Returns:
        The section, with defaults in place of invalid values, and whether all values were valid.
    """
    if given is not None and not isinstance(given, dict):
        problems.append(f"{path.rstrip('.')}: expected a mapping of options, got {shape(given)}")
    tree: Mapping[str, object] = given if isinstance(given, dict) else {}
    before = len(problems)
    rows = _rows(kind)
    problems += [path + unknown(key, rows) for key in tree if key not in rows]
    valid, values = True, dict[str, Any]()
    for key, (field, what) in rows.items():
        if isinstance(what, Option):
            raw = tree.get(key)
            value = None if raw is None else attempt(what.kind, raw, path + key, problems)
            value = over.get(key, value)
            valid = valid and not isinstance(value, Refused)
            if value is not None and not isinstance(value, Refused):
                values[field] = value
        elif what is not None:
            inner = {k.removeprefix(f"{key}."): v for k, v in over.items() if k.startswith(f"{key}.")}
            values[field], inner_valid = read_section(what, tree.get(key), f"{path}{key}.", inner, problems)
            valid = valid and inner_valid
    valid = valid and len(problems) == before
    built = kind(**values)
    if valid:  # a default in place of an invalid value could cause false conflicts
        problems += [path + conflict for conflict in built.conflicts()]
    return built, valid


def plain(part: Section) -> dict[str, object]:
    """Turn a section into the contents of a file: secrets masked, unset values left out."""
    shown: dict[str, object] = {}
    for key, (field, what) in _rows(type(part)).items():
        value = getattr(part, field)
        if isinstance(value, Section):
            shown[key] = plain(value)
        elif value is not None and isinstance(what, Option):
            shown[key] = what.kind.show(value)
    return {key: value for key, value in shown.items() if value != {}}


_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("bool", "float", "int", "map", "merge", "null", "seq", "str", "timestamp", "value")
}


def read_yaml(text: str, name: str, named: str = "") -> tuple[dict[str, object], list[str]]:
    """Read a YAML mapping as nested dicts, lists, texts and None, strictly.

    Scalars stay the text that was written (``0123`` and ``1e3`` are not yet numbers: the option's kind
    decides). A duplicated key is a problem; plain YAML would silently keep the last.

    Args:
        text: the document.
        name: of the document, for problems without a key.
        named: the path of a mapping whose keys are names, which may be more than plain words.

    Returns:
        The tree, and the problems, which never repeat a part of the text: it may hold secrets.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        reader = _YamlReader(named)
        tree = None if root is None else reader.value(root, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = _without_quotes(error.problem or error.context or "unreadable")
        return {}, [f"{name}: {where}bad yaml: {problem}"]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        return {}, [f"{name}: line {line}: bad yaml: a character that yaml does not allow"]
    except (ValueError, OverflowError):  # PyYAML lets some escapes and directives through to chr() and int()
        return {}, [f"{name}: bad yaml: an escape or number that is out of range"]
    except RecursionError:
        return {}, [f"{name}: bad yaml: nested too deeply"]
    if isinstance(tree, dict) or tree is None:  # an empty file, or only comments, is no error
        return tree or {}, reader.problems
    return {}, [*reader.problems, f"{name}: expected a mapping of options, got {shape(tree)}"]


def _without_quotes(problem: str) -> str:
    """Drop PyYAML's quotes from the text (an alias, a tag), but keep ``expected ',' or ']'``."""

    def keep(found: re.Match[str]) -> str:
        inner = found[2]
        return found[0] if len(inner) == 1 or inner.startswith("<") else "'...'"

    return re.sub(r"(['\"])(.*?)\1", keep, problem, flags=re.DOTALL)


def _is_name(node: yaml.Node) -> bool:
    return node.tag.endswith(":str") and node.value.isprintable() and ":" not in node.value


_OPEN = object()  # a node whose value is being read


class _YamlReader:
    """Turns nodes into values, and collects the problems."""

    def __init__(self, named: str) -> None:
        self.problems: list[str] = []
        self._named = named
        self._known: dict[int, object] = {}  # each aliased node once: aliases of aliases grow exponentially

    def value(self, node: yaml.Node, path: str) -> object:
        """Return the value of the node at `path`."""
        if node.tag not in _TAGS:
            self._problem(path, node, "a tag that is not supported")
            return None
        if isinstance(node, yaml.ScalarNode):
            return None if node.tag.endswith(":null") else str(node.value)
        if id(node) not in self._known:
            self._known[id(node)] = _OPEN
            self._known[id(node)] = self._collection(node, path)
        if self._known[id(node)] is _OPEN:
            self._problem(path, node, "an alias inside the value that it refers to")
            return None
        return self._known[id(node)]

    def _collection(self, node: yaml.Node, path: str) -> object:
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
        values: dict[str, object] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            line = key_node.start_mark.line + 1
            word = _WORD.fullmatch(key)  # otherwise not repeated: it may be half of a secret's line
            shown = key if word else "(a name)"
            here = f"{path}.{shown}" if path else shown
            if not word and not (path and path == self._named and _is_name(key_node)):
                self._problem(path, key_node, "a key that is not a plain word")
            elif key in values:
                self.problems.append(f"{here}: duplicated key (lines {lines[key]} and {line})")
            else:
                lines[key] = line
                values[key] = self.value(value_node, here)
        return values

    def _problem(self, path: str, node: yaml.Node, what: str) -> None:
        self.problems.append(f"{path + ': ' if path else ''}line {node.start_mark.line + 1}: {what}")
