"""Every error shardload raises, as one tree.

    ShardloadError
    ├── UsageError (ValueError, TypeError)  an argument has a wrong type or value; nothing was opened
    ├── SourceError (ValueError)            the checkpoint's bytes are not what they claim to be
    │   ├── UnsafeSourceError               it points outside its folder, or declares far more than it stores
    │   ├── TruncatedSourceError            a file is shorter than its headers say
    │   └── DamagedError                    a step's bytes differ from the saved ones
    ├── SourceNotFoundError (FileNotFoundError)   there is no checkpoint of that name or path
    ├── UnsupportedError (ValueError)       well-formed, but shardload cannot read it
    │   └── BackendError                    Keras does not run on JAX
    ├── MismatchError (ValueError)          checkpoint and model disagree: names, shapes, dtypes
    ├── MeshError (ValueError)              the mesh cannot be made: syntax, too few devices
    ├── LayoutError (ValueError)            a layout does not fit a variable or the mesh; a rule matches no variable
    │   └── DoesNotFitError                 no layout on the mesh fits the limit on device memory
    ├── BudgetError (ValueError)            the host-memory budget is too small for one block
    ├── TransferError (OSError)             reading failed half-way: a file shrank, vanished, or could not be read
    ├── LoadInterruptedError                a load ended half-way; describes the model's current values
    ├── DisagreementError (ValueError)      processes make different calls, or a sharded model computes other values
    ├── ProcessFailedError (RuntimeError)   a call failed on another process, with an error that is not from shardload
    ├── UninitialisedError (ValueError)     a variable was read that has no value yet
    ├── LimitError (OSError)                a limit of the process was reached: open files, memory, threads
    ├── WriteError (OSError)                a file cannot be written: no space, no permission, something in the way
    ├── SaveError (OSError)                 a step could not be saved: step, location and cause
    │   └── ProcessLostError                another process of this run ended or stopped responding
    ├── StepExistsError (FileExistsError)   a step with this number already exists; nothing is overwritten
    └── MissingExtraError (ImportError)     a package is not installed, or not completely

Each message has the tensor, file and offset, the expected and the received value, and how to
fix it. Each class subclasses the builtin a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
import errno
import functools
import importlib.util
import inspect
import itertools
import os
import re
import resource
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

_USER = re.compile(r"\b([a-z][a-z0-9+.\-]*:/{1,2})[^\s/?#]*@", re.ASCII | re.IGNORECASE)
_QUERY = re.compile(r"\b([a-z][a-z0-9+.\-]*:/{1,2}[^\s?#'\"]*\?)[^\s'\"]+", re.ASCII | re.IGNORECASE)

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "BackendError",
    "BudgetError",
    "DamagedError",
    "DisagreementError",
    "DoesNotFitError",
    "LayoutError",
    "LimitError",
    "LoadInterruptedError",
    "MeshError",
    "MismatchError",
    "MissingExtraError",
    "ProcessFailedError",
    "ProcessLostError",
    "SaveError",
    "ShardloadError",
    "SourceError",
    "SourceNotFoundError",
    "StepExistsError",
    "TransferError",
    "TruncatedSourceError",
    "UninitialisedError",
    "UnsafeSourceError",
    "UnsupportedError",
    "UsageError",
    "WriteError",
]


class ShardloadError(Exception):
    """Base class of every error this package raises on purpose."""

    def __str__(self) -> str:
        """Return the message, without the passwords and keys in any addresses that it quotes."""
        return without_secrets(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows for the error: the user's lines up to the call into this package; the message."""
        package, console = f"{Path(__file__).parent}{os.sep}", f"{os.sep}IPython{os.sep}"
        frames = traceback.extract_tb(self.__traceback__)
        outer = itertools.takewhile(lambda frame: not frame.filename.startswith(package), frames)
        # IPython's own frames come before those of the cell.
        called = [frame for frame in outer if console not in frame.filename]
        lines = "".join(traceback.format_list(called)).splitlines()
        return [*lines, f"{public_name(self)}: {self}"]


class UsageError(ShardloadError, ValueError, TypeError):
    """An argument has a wrong type or value; nothing was opened, nothing changed."""


class SourceError(ShardloadError, ValueError):
    """The checkpoint's bytes contradict themselves or their format."""


class UnsafeSourceError(SourceError):
    """The checkpoint reaches outside its folder, or declares far more than it stores."""


class TruncatedSourceError(SourceError):
    """The file ends before the place its headers point to."""


class DamagedError(SourceError):
    """A step's bytes differ from the saved ones; the message names step, file and offset."""


class SourceNotFoundError(ShardloadError, FileNotFoundError):
    """There is no checkpoint of the name, path or URL that was given."""


class UnsupportedError(ShardloadError, ValueError):
    """The checkpoint is well-formed, but its format or content cannot be loaded."""


class BackendError(UnsupportedError):
    """Keras does not run on JAX; the message says which environment variable to set, and when."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"shardload needs Keras on JAX, but Keras was imported to run on {found!r}. Set the environment variable "
            "KERAS_BACKEND=jax (in Python: os.environ['KERAS_BACKEND'] = 'jax') before anything imports Keras, and "
            "restart Python"
        )

    @classmethod
    def explaining(cls, error: ImportError) -> Exception:
        """Return a clearer error if Keras cannot be imported without its backend; any other error unchanged.

        Keras defaults to TensorFlow; if that is not installed, Keras' own error does not say that a backend is missing.
        """
        missing = (error.name or "").split(".")[0]
        return cls(missing) if missing in ("tensorflow", "torch", "openvino") else error

    @classmethod
    def of_tensor_parallelism(cls, asked: str) -> BackendError:
        """Return the error for a ``distributed_backend`` that does not run on JAX, such as ``"nccl"``.

        ``distributed_backend`` is an argument of `shardload.TensorParallelKeras`: what moves data between devices.
        ``asked`` is the value that the caller passed.
        """
        # Past the constructor, whose message is about the backend that Keras was imported with.
        error = cls.__new__(cls)
        super(BackendError, error).__init__(
            f"Cannot use distributed_backend={asked!r}: shardload runs on JAX only, where XLA moves data between "
            "devices (over NCCL on GPUs). Use distributed_backend='auto', with KERAS_BACKEND=jax set before anything "
            "imports Keras"
        )
        return error


class MismatchError(ShardloadError, ValueError):
    """Checkpoint and model disagree: a variable has no tensor, a tensor no variable, or a shape or dtype differs.

    Args:
        problem: What disagrees; it also says that the model is unchanged, where this is so.
        advice: How to fix it, which is added to the message.
        other_arguments: Whether the advice is to call the same function with other arguments.
    """

    def __init__(self, problem: str, advice: str = "", *, other_arguments: bool = False) -> None:
        super().__init__(f"{problem}{advice}")
        self.problem, self.other_arguments = problem, other_arguments


class MeshError(ShardloadError, ValueError):
    """The mesh cannot be made: its text is not valid, or there are too few devices."""


class LayoutError(ShardloadError, ValueError):
    """A layout does not fit a variable (its shape, the mesh), or a layout rule matches no variable."""


class DoesNotFitError(LayoutError):
    """No layout of a model on a mesh fits the limit on device memory.

    Args:
        problem: What does not fit.
        least_bytes: Bytes per device of the layout that needs the least memory.
        hint: How a layout that fits could be found, which is added to the message.
    """

    def __init__(self, problem: str, *, least_bytes: int, hint: str = "") -> None:
        super().__init__(f"{problem}{hint}")
        self.problem, self.least_bytes = problem, least_bytes


class BudgetError(ShardloadError, ValueError):
    """The limit on host memory is too small for a single block (a range of a file that is read in one go)."""


class TransferError(ShardloadError, OSError):
    """The data of a tensor could not be read, although the headers are fine: a file shrank, vanished, or failed."""


class LoadInterruptedError(ShardloadError):
    """A load ended half-way; the message describes the model's current values."""


class DisagreementError(ShardloadError, ValueError):
    """Arguments of processes, or results of a sharded model and the same model on one device, differ.

    Processes that load or save together were given different things, and nothing was read or written; or a sharded
    model computes something else than the same model on one device.
    """


class ProcessFailedError(ShardloadError, RuntimeError):
    """A call failed on another process, with an error that is not from shardload; the message names both."""


class UninitialisedError(ShardloadError, ValueError):
    """A variable has no value: its model was built without values, and no load has given it one yet.

    Args:
        message: What has no value, and how to give it one.
        variable: The path of the variable, if the error is about a single one.
    """

    def __init__(self, message: str, variable: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable


_OS_CODE = re.compile(r"os_error_code='(\d+)'")
_WORDS = {
    "RESOURCE_EXHAUSTED": errno.ENOSPC,
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "File too large": errno.EFBIG,
    "PERMISSION_DENIED": errno.EACCES,
    "Permission denied": errno.EACCES,
    "Read-only file system": errno.EROFS,
    "No ArrayMetadata found": errno.ENOENT,
    "Too many open files in system": errno.ENFILE,
    "Too many open files": errno.EMFILE,
    "Cannot allocate memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
}
"""Text in an error of a library that raises no `OSError` → its errno. Of similar texts, the longer one comes first."""


def errno_of(error: BaseException) -> int | None:
    """Return the operating system's error number, from the error, its causes, or their messages; ``None`` if none."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        link, cause = cause, cause.__cause__ or cause.__context__
        if isinstance(link, OSError) and link.errno:
            return link.errno
        if isinstance(link, MemoryError):  # NumPy's says how many bytes, not why
            return errno.ENOMEM
        # TensorStore's code is exact; the words after it are a guess for errors without one.
        text = str(link)
        if found := _OS_CODE.search(text):
            return int(found.group(1))
        for words, number in _WORDS.items():
            if words in text:
                return number
    return None


WAYS_OUT = {
    errno.EMFILE: "Raise the limit on open files: ulimit -n 4096",
    errno.ENFILE: "Close other programs, or raise the machine's limit on open files: sysctl fs.file-max",
    errno.ENOMEM: "Free some memory, or raise this process's limit: ulimit -v unlimited",
    errno.EAGAIN: "Raise the limit on threads and processes, or that on memory: ulimit -u, ulimit -v",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f unlimited), or choose another file system",
    errno.ENOSPC: "Free some space, or choose another disk",
    errno.EDQUOT: "Free some space of this user's quota, or choose another disk",
    errno.EROFS: "Choose a place that can be written",
    errno.EACCES: "Check its owner and mode, or choose another place",
    errno.EPERM: "Check its owner and mode, or choose another place",
}
"""errno → the end of an error message: how to fix it, for errors that do not mean that a file is damaged."""
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_SYSTEM = frozenset({*_LIMITS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def public_name(error: BaseException) -> str:
    """Return the name of an error's class; of a class that shardload keeps to itself, of the closest public one.

    Errors of Python and of other packages keep their names.
    """
    public = {globals()[name] for name in __all__}
    package = __name__.partition(".")[0]
    if isinstance(error, ShardloadError):
        return next(cls.__name__ for cls in type(error).__mro__ if cls in public)
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__.partition(".")[0] != package)


def reason_text(error: BaseException) -> str:
    """Return the text of another package's error for a message, without a period; of a `KeyError`, what is lacking."""
    if isinstance(error, KeyError):
        return f"the entry {error} is missing"
    return (str(error) or public_name(error)).rstrip(".")


def is_of_system(error: BaseException) -> bool:
    """Whether a limit of the system or the disk (full, read-only) caused an error: then no file is to blame."""
    return errno_of(error) in _SYSTEM


class LimitError(ShardloadError, OSError):
    """A limit of the process or machine on files, memory or threads was reached; the file may be intact."""

    @classmethod
    def explaining(cls, error: BaseException, doing: str) -> LimitError | None:
        """Return a `LimitError` if a limit of the process or machine caused ``error``, else ``None``.

        ``error`` may name the cause in its text only, as some libraries do; ``doing`` is what failed: ``"open x.h5"``.
        """
        if isinstance(error, cls):
            return error
        if (number := errno_of(error)) not in _LIMITS or number is None:
            return None
        allowed, memory = "", resource.getrlimit(resource.RLIMIT_AS)[0]
        if number == errno.EMFILE:
            allowed = f" (at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} in this process)"
        elif number == errno.ENOMEM and memory != resource.RLIM_INFINITY:
            allowed = f" (ulimit -v allows this process {memory >> 20} MiB of address space)"
        made = cls(f"Cannot {doing}: {os.strerror(number)}{allowed}. {WAYS_OUT[number]}")
        made.errno = number
        return made


class WriteError(ShardloadError, OSError):
    """A file cannot be written: no space, no permission, or something is in the way."""


class SaveError(ShardloadError, OSError):
    """A step could not be saved; the message names step, folder and cause (``errno`` is set if known)."""


class ProcessLostError(SaveError):
    """Another process of this run ended or stopped responding, so collective operations are impossible."""

    in_order = False
    """Whether the other process exited normally, so that it still takes part in the shutdown of JAX."""


class StepExistsError(ShardloadError, FileExistsError):
    """A step with this number already exists; a published step is never overwritten."""


_OWN = (
    *("jax", "jaxlib", "keras", "orbax", "numpy", "ml_dtypes", "scipy", "h5py", "tensorstore", "xxhash"),
    *("typer", "rich"),
)
_OF_HUB = ("keras_hub", "kagglehub", "huggingface_hub", "safetensors", "sentencepiece", "tokenizers")
_OF_SERVER = ("aiohttp", "prometheus_client")
_EXTRAS = {
    **dict.fromkeys(_OWN, ""),
    **dict.fromkeys(_OF_HUB, "hub"),
    **dict.fromkeys(_OF_SERVER, "serve"),
    "gguf": "gguf",
    "grain": "data",
}
"""Name of a module → the extra of shardload that installs it; ``""`` if shardload needs no extra for it."""


class MissingExtraError(ShardloadError, ImportError):
    """A package is missing or incomplete; the message names it, and the extra of shardload that installs it, if any."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'shardload[{extra}]'"
        )
        self.package = package
        self.extra = extra

    @classmethod
    def explaining(cls, error: ImportError, *, needed_for: str, extra: str | None = None) -> MissingExtraError:
        """Return the error for a failed import, which says whether the module is missing or only a part of it.

        ``needed_for`` begins the message ("Reading x.gguf"). ``extra`` is the extra of shardload that installs the
        module; it is used only for modules that `_EXTRAS` does not list.
        """
        if isinstance(error, cls):
            return error
        # A package that catches a failed import and raises its own loses the name.
        while not error.name and isinstance(cause := error.__cause__ or error.__context__, ImportError):
            error = cause
        module = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(module, extra)
        package = module if extra is None else f"'shardload[{extra}]'" if extra else "shardload"
        # Asked first, because find_spec raises for entries without a spec; an entry of None refuses the import.
        is_known = module in sys.modules
        is_installed = sys.modules[module] if is_known else module and importlib.util.find_spec(module)
        if module and is_installed is None:
            found = f"needs the package {module.replace('_', '-')!r}, which is not installed"
            advice = "the package that provides it" if extra is None else f"it with: pip install {package}"
        else:  # a part of a package is missing, or the error comes without a name
            found = f"failed to import a package: {str(error).strip().rstrip('.')}"
            again = f": pip install --upgrade --force-reinstall {package}" if package else ""
            advice = f"it again if it is incomplete, or in another version than expected{again}"
        made = cls.__new__(cls)
        super(MissingExtraError, made).__init__(f"{needed_for} {found}. Install {advice}")
        made.package, made.extra = module, extra or ""
        return made


def import_failure(error: BaseException) -> ImportError | None:
    """Return the failed import that caused an error, so that the message can name its package; ``None`` if none did."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ImportError):
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return found


def suggests_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function, so that a call with wrong arguments is a `UsageError` instead of a `TypeError`.

    For an unknown keyword argument, the message suggests the closest known one.
    """
    signature = inspect.signature(function)
    known = signature.parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        name = function.__qualname__.removesuffix(".__init__")
        if unknown := [given for given in kwargs if given not in known]:
            raise UsageError(f"{name}() has no argument {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            shown = ", ".join(n if p.default is p.empty else f"{n}=…" for n, p in known.items() if n != "self")
            shown = textwrap.shorten(shown, 200, placeholder=" …")
            raise UsageError(f"Cannot call {name}({shown}): {error}") from None
        return function(*args, **kwargs)

    return checked


def require_callable_with(function: Callable[..., object], *arguments: object, name: str) -> None:
    """Raise a `UsageError` unless ``function``, passed by a caller as ``name=``, can be called with ``arguments``."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        count = "1 argument" if len(arguments) == 1 else f"{len(arguments)} arguments"
        raise UsageError(f"Cannot call {name}={function!r:.60} with {count}: {error}") from None
    except ValueError:  # a builtin that states no signature
        return


def without_secrets(text: str) -> str:
    """Return ``text`` with user and query of each address hidden, as they may have keys: ``https://…@host/file?…``."""
    return _QUERY.sub(r"\1…", _USER.sub(r"\1…@", text))


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'mesh'?"``, or an empty string if no known name is close."""
    close = difflib.get_close_matches(wanted, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
