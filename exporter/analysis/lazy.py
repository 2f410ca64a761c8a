"""A property that is computed when it is first read, and kept."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["lazy"]

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 - a decorator
    """`functools.cached_property` without its lock, which costs more than most values before Python 3.12."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        """Take the function that computes the value of an instance."""
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, _owner: type | None = None) -> T:
        value = instance.__dict__[self._name] = self._make(instance)
        return value
