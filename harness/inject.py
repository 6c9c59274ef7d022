"""Break one thing on purpose, know that it happened, and mend it.

Faults are generator functions ``(port)`` that use these context managers. Each counts how often the broken code ran: a fault that never fired
proves nothing and is reported as *inert*.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from loudfail.harness.port import Port


class Fired:
    """How often injected code ran."""

    def __init__(self) -> None:
        self.count = 0


_current: contextvars.ContextVar[Fired | None] = contextvars.ContextVar("loudfail_fired", default=None)


@contextlib.contextmanager
def counting() -> Iterator[Fired]:
    """Collect the firings of everything injected inside."""
    fired = Fired()
    token = _current.set(fired)
    try:
        yield fired
    finally:
        _current.reset(token)


@contextlib.contextmanager
def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], clear: tuple[Any, ...] = ()) -> Iterator[Fired]:
    """Replace a function or method by ``make(original)`` and count its calls.

    Args:
        owner: module, class or instance that holds it.
        name: its attribute. A static method stays one; on an instance the replacement is called without ``self``.
        make: gets the original (bound, if ``owner`` is an instance) and returns what is called instead.
        clear: functions with an ``lru_cache`` whose results depend on it; emptied before and after.

    Raises:
        AttributeError: there is nothing of that name to break.
    """
    fired = _current.get() or Fired()
    own = vars(owner).get(name) if hasattr(owner, "__dict__") else None
    original = getattr(owner, name)
    broken = make(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        fired.count += 1
        return broken(*args, **kwargs)

    for cached in clear:
        cached.cache_clear()
    setattr(owner, name, staticmethod(wrapper) if isinstance(own, staticmethod) else wrapper)
    try:
        yield fired
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
        for cached in clear:
            cached.cache_clear()


@contextlib.contextmanager
def assign(owner: Any, name: str, value: Any, clear: tuple[Any, ...] = ()) -> Iterator[Fired]:
    """Replace a constant. It counts as fired once, since reads of a constant cannot be seen; prefer `replace`."""
    fired = _current.get() or Fired()
    had, old = name in vars(owner), getattr(owner, name)
    for cached in clear:
        cached.cache_clear()
    setattr(owner, name, value)
    fired.count += 1
    try:
        yield fired
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)
        for cached in clear:
            cached.cache_clear()


@contextlib.contextmanager
def in_ranks(port: Port, enter: Callable[..., AbstractContextManager[Any]], argument: Any = None, *, rebuild: bool = False) -> Iterator[None]:
    """Enter a module-level context manager function in every rank of every engine that the port opens meanwhile.

    Args:
        port: its `engine` is wrapped.
        enter: called in the ranks (with ``argument`` if that is not None); usually returns `replace` of an upstream class.
        rebuild: build the engine's model afresh inside the patch, for patches of construction or loading.
    """
    fired = _current.get() or Fired()
    patched: dict[int, Any] = {}
    original: Callable[[int], Any] = port.engine

    def restore(engine: Any) -> None:
        engine.remove_adapter()
        if rebuild:
            engine.rebuild()
            engine.load_base(port.base_state())

    def engine(degree: int) -> Any:
        opened = original(degree)
        if degree not in patched or patched[degree] is not opened:
            patched[degree] = opened
            opened.patch(enter, argument)
            restore(opened)
        return opened

    port.engine = engine  # type: ignore[method-assign]
    try:
        yield
    finally:
        del port.engine
        for opened in patched.values():
            if opened.world.alive:
                fired.count += opened.unpatch()
                restore(opened)


@contextlib.contextmanager
def in_engines(port: Port, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """`replace` a method of every engine that the port opens meanwhile, whatever its class: on this side of the ranks."""
    original: Callable[[int], Any] = port.engine
    patched: set[int] = set()
    with contextlib.ExitStack() as stack:

        def engine(degree: int) -> Any:
            opened = original(degree)
            if id(opened) not in patched:
                patched.add(id(opened))
                stack.enter_context(replace(opened, name, make))
            return opened

        port.engine = engine  # type: ignore[method-assign]
        try:
            yield
        finally:
            del port.engine
