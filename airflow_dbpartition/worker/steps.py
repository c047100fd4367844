"""The registry of steps: names that travel through the database, and the functions that stay here."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from airflow_dbpartition.errors import ConfigurationError, UnknownStepError
from airflow_dbpartition.schema import STEP_NAME_LENGTH

ENTRY_POINT_GROUP = "airflow_dbpartition.steps"

StepFunction = Callable[[Any], Any]
F = TypeVar("F", bound=StepFunction)

_registry: dict[str, StepFunction] = {}
_stand_ins: dict[str, StepFunction] = {}


def step(name: str) -> Callable[[F], F]:
    """Register a function (or a `ChunkStep`) as a step: `@step("reconcile")`.

    Args:
        name: what DAGs call it, 1 to 200 characters; only this name travels through the database.

    Raises:
        ConfigurationError: for a bad name, or one that another function has.
    """
    _check_name(name)

    def register(function: F) -> F:
        _check_function(name, function)
        known = _registry.get(name)
        if known is not None and _origin(known) != _origin(function):
            raise ConfigurationError(
                f"step {name!r} is registered twice, by {_shown(known)} and {_shown(function)}: rename one"
            )
        _registry[name] = function
        return function

    return register


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= STEP_NAME_LENGTH or "\x00" in name:
        raise ConfigurationError(f'expected @step to be given a name, as in @step("reconcile"), got {name!r}')


def _check_function(name: str, function: object) -> None:
    if not callable(function):
        raise ConfigurationError(f"expected step {name!r} to be a function or a ChunkStep, got {function!r}")


def _origin(function: StepFunction) -> tuple[str, str]:
    """Where a step comes from; a module that is imported again registers the same step again, which is no clash.

    By file, since Airflow and pytest import one under names of their own.
    """
    module, place = _place(function)
    return getattr(sys.modules.get(module), "__file__", None) or module, place


def _shown(function: StepFunction) -> str:
    return ".".join(_place(function))


def _place(function: StepFunction) -> tuple[str, str]:
    if (defined_at := getattr(function, "defined_at", None)) is not None:
        module, _, line = str(defined_at).rpartition(":")
        return module, line
    module = getattr(function, "__module__", "?")
    return module, getattr(function, "__qualname__", type(function).__name__)


def registered_steps() -> Mapping[str, StepFunction]:
    """Every step that has been registered in this process."""
    return MappingProxyType({**_registry, **_stand_ins})


@contextmanager
def standing_in(functions: Mapping[str, StepFunction]) -> Iterator[None]:
    """Inside the block these functions are the steps of their names, whoever else has registered them.

    Raises:
        ConfigurationError: for a bad name, or what is no function.
    """
    for name, function in functions.items():
        _check_name(name)
        _check_function(name, function)
    before = dict(_stand_ins)
    _stand_ins.update(functions)
    try:
        yield
    finally:
        _stand_ins.clear()
        _stand_ins.update(before)


def find_step(name: str) -> StepFunction:
    """The function of a step.

    Raises:
        UnknownStepError: nobody registered it here.
    """
    steps = registered_steps()
    try:
        return steps[name]
    except KeyError:
        known = ", ".join(sorted(steps)) or "none"
        raise UnknownStepError(f"step {name!r} is not registered in this process (registered: {known})") from None


def load_steps(modules: Iterable[str]) -> tuple[str, ...]:
    """Import the modules, then the entry points of group `airflow_dbpartition.steps`; returns the names registered.

    Args:
        modules: dotted names, or paths of .py files.

    Raises:
        ConfigurationError: a module cannot be imported; the message names it and says why.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a console script does not
    for module in modules:
        _guarded(module, partial(_import, module))
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        _guarded(f"{entry_point.value} (entry point {entry_point.name!r})", entry_point.load)
    return tuple(sorted(registered_steps()))


def _import(module: str) -> None:
    path = Path(module)
    if path.suffix == ".py":
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        if _is_loaded(path):
            return  # under whatever name: a second copy would have a state of its own
        sys.path.insert(0, str(path.resolve().parent))
        module = path.stem
    loaded = importlib.import_module(module)
    if path.suffix == ".py" and Path(loaded.__file__ or "").resolve() != path.resolve():
        raise ConfigurationError(
            f"cannot import {path}: a module named {module!r} is loaded already, from {loaded.__file__}: rename one"
        )


def _is_loaded(path: Path) -> bool:
    files = [str(getattr(module, "__dict__", {}).get("__file__")) for module in list(sys.modules.values())]
    return any(file.endswith(path.name) and Path(file).resolve() == path.resolve() for file in files)


def _guarded(name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except ConfigurationError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 2 else ""
        raise ConfigurationError(
            f"cannot import {name}: {type(error).__name__}: {error}{where}; "
            "check --import and that the module is installed here"
        ) from error
