"""Updates in machine code, for small networks on the CPU: the whole block without Python in between.

numba compiles the loops of :mod:`.native_block` and :mod:`.native_tight` once per kernel and dtype, in a few seconds,
and keeps the machine code in a folder of the user's. Without numba (the extra ``fast``), updates run as torch
operations. A short training does not wait for the compiler, see :func:`is_worth_compiling`.
"""

import hashlib
import importlib.metadata
import logging
import os
import platform
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ksm_lightning.kernels import scalar
from ksm_lightning.learning import native_algebra, native_block, native_tight, rules, tight_rule
from ksm_lightning.learning.exact_tight import JITTER
from ksm_lightning.learning.observation import Observation
from ksm_lightning.learning.rules import GainRule, NaturalRule
from ksm_lightning.learning.tight_rule import TightRule, keeps_lengths
from ksm_lightning.network import KSMNetwork, TightNetwork
from ksm_lightning.network.functional import EnergyTerms

_logger = logging.getLogger(__name__)

# Beyond this number of landmarks, or of products p batch max(m, n), torch is as fast. Measured on two cores
# (scripts/benchmark/RESULTS.md, "Machine code or torch"): p = 160 takes 0.7 of torch's time, 256 the same.
MOST_LANDMARKS, MOST_PRODUCTS = 160, 5_000_000
# Sums may be reordered and products fused, but NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}


class NativeUpdates:
    """Runs blocks of updates of a network in machine code, where that is possible and faster.

    Args:
        network: The network, changed in place.
        rule: Its learning rule.
        is_forced: Whether to use machine code for all networks that it can handle, also for large ones.
    """

    def __init__(self, network: KSMNetwork, rule: GainRule | TightRule, *, is_forced: bool = False) -> None:
        self.network, self.rule, self.is_forced = network, rule, is_forced

    def fits(self, batches: Tensor) -> bool:
        """Whether a block of batches (updates, batch, m) should run in machine code."""
        return _scalar_form(self.network, batches.shape[1], self.is_forced) is not None and is_available()

    def run(self, batches: Tensor, sizes: np.ndarray, observed: Sequence[int] = ()) -> tuple[int, list[Observation]]:
        """One update per batch (updates, batch, m) with step sizes (updates, 3) of W, q and L.

        Returns a number that is not 0 if an update failed, and what the updates at the given indices showed.
        """
        network, rule, kernel = self.network, self.rule, self.network.kernel
        W, gains, L = network.W.detach(), network.gains.detach(), network.L.detach()
        dtype = W.numpy().dtype
        found = scalar.scalar_kernel(kernel, float(np.finfo(dtype).eps))
        assert found is not None
        x, steps = np.ascontiguousarray(batches.detach().to(W).numpy()), np.ascontiguousarray(sizes, dtype)
        weights = (W.numpy(), gains.numpy(), L.numpy())
        ridge, params, tiny = dtype.type(network.ridge), np.asarray(found.params, dtype), np.finfo(dtype).tiny
        shape = (len(observed), len(W), x.shape[1])
        k, y, numbers = np.empty(shape, dtype), np.empty((shape[0], len(L), shape[2]), dtype), np.empty((shape[0], 10))
        seen = (np.asarray(observed, np.int64), k, y, numbers)
        block = _compile(found.formula, found.self_formula, kernel.is_radial, isinstance(rule, TightRule))
        if isinstance(rule, TightRule):
            square, count = rule.lengths(W)
            averages, wide = (square.numpy(), count), np.asarray(found.params, np.float64)
            fixed = (ridge, params, wide, tiny, JITTER[W.dtype], keeps_lengths(kernel))
            failed = block(x, *weights, *averages, steps, *fixed, *seen)
            rule.count(len(x))
        else:
            is_natural = isinstance(rule, NaturalRule)
            failed = block(x, *weights, steps, ridge, params, tiny, not kernel.is_homogeneous, is_natural, *seen)
        for each in (network.W, network.gains, network.L):
            torch.autograd.graph.increment_version(each)
        shown = zip(torch.from_numpy(k).mT, torch.from_numpy(y).mT, torch.from_numpy(numbers), strict=True)
        return failed, [_observation(*each) for each in shown]


def _scalar_form(network: KSMNetwork, batch: int, is_forced: bool) -> scalar.ScalarKernel | None:
    """The kernel of a network as functions of numbers; None if batches should not run in machine code."""
    W, n = network.W, network.num_neurons
    if W.device.type != "cpu" or W.dtype not in (torch.float32, torch.float64) or batch == 0:
        return None
    p, m = W.shape
    if not is_forced and (p > MOST_LANDMARKS or p * batch * max(m, n) > MOST_PRODUCTS):
        return None
    found = scalar.scalar_kernel(network.kernel, torch.finfo(W.dtype).eps)
    return found if found is not None and _are_in_range(found.params, W.dtype) else None


def is_worth_compiling(network: KSMNetwork, batch: int, updates: int) -> bool:
    """Whether a training should use machine code where it can: not if it is short and would wait for the compiler.

    The compiler takes 6 to 9 seconds, in every process of a parallel search. So a process that finds no machine code on
    disk starts with torch operations, and compiles when its updates have lost about as much time to them: it never
    takes much more than twice as long as with the better choice. Both ways agree up to rounding.

    Args:
        network: The network.
        batch: Points per update.
        updates: Number of updates of the training.
    """
    found = _scalar_form(network, batch, is_forced=False)
    if found is None or not is_available():
        return True
    code = _code_name(found.formula, isinstance(network, TightNetwork), network.W.numpy(force=True).dtype)
    if code not in _is_ready:  # once per process: trainings of a process should not differ by what others compile
        _is_ready[code] = any((folder / code).exists() for folder in _places())
    if not _is_ready[code]:
        _updates_without[code] += updates
    return _is_ready[code] or _updates_without[code] >= PATIENCE


PATIENCE = 10_000
"""Updates by torch operations in a process that take as much longer than machine code as its compilation takes."""
_is_ready: dict[str, bool] = {}
_updates_without: Counter[str] = Counter()


def _code_name(formula: scalar.Formula, is_tight: bool, dtype: np.dtype[Any]) -> str:
    """The name of the file that says that machine code for a kernel, bound and dtype is on disk."""
    bound, python = "tight" if is_tight else "paper", sys.implementation.cache_tag
    # numba looks for its files by the location and the time of the source, which a second checkout does not share.
    source = Path(native_tight.__file__ if is_tight else native_block.__file__)
    place = hashlib.sha256(f"{source}-{source.stat().st_mtime_ns}".encode()).hexdigest()[:8]
    about = f"{python}-{importlib.metadata.version('numba')}-{platform.machine()}-{_source_digest()}-{place}"
    return f"{formula.__name__}-{bound}-{dtype}-{about}.ready"


def _observation(k: Tensor, y: Tensor, numbers: Tensor) -> Observation:
    *energy, W, q, L, smallest_gain, condition = numbers.unbind()
    return Observation(k, y, EnergyTerms(*energy), (W, q, L), smallest_gain, condition)


def _are_in_range(params: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether the squares of a kernel's numbers, such as ``1 / sigma^2``, are numbers in the dtype of the weights."""
    limits = torch.finfo(dtype)
    return all(limits.tiny < number * number < limits.max for number in params)


@cache
def is_available() -> bool:
    """Whether numba is installed."""
    found = find_spec("numba") is not None
    _logger.debug("Small networks on the CPU learn by %s.", "machine code" if found else "torch operations: no numba")
    return found


@cache
def _compile(
    formula: scalar.Formula, self_formula: scalar.SelfFormula, is_radial: bool, is_tight: bool
) -> Callable[..., int]:
    """The block of updates with a kernel. Machine code for a dtype is made, or read from disk, at the first call."""
    import numba
    from numba.extending import register_jitable

    from ksm_lightning.learning import native_exponential  # noqa: F401  its version is the one that numba finds

    fill = native_block.make_fill(formula, is_radial)
    own = (native_block.record, native_tight.observe_landmarks, formula, self_formula, fill)
    for function in (*native_algebra.ALGEBRA, *own):
        _register(register_jitable, function)
    make = native_tight.make_tight_block if is_tight else native_block.make_block
    block = make(fill, self_formula)
    with _cache_folder(numba.config) as folder:
        compiled = numba.njit(fastmath=_FAST, error_model="numpy", nogil=True, cache=folder is not None)(block)
    COMPILED.append(compiled)
    return _announced(compiled, formula, is_tight, folder)


COMPILED: list[Any] = []
"""The compiled functions of this process, one per kernel."""
_registered: set[Any] = set()


def _register(register_jitable: Any, function: Any) -> None:
    # Inlined: a function that is called would be another one, with other rounding, in code that was read from disk.
    if function not in _registered:
        register_jitable(fastmath=_FAST, error_model="numpy", forceinline=True)(function)
        _registered.add(function)


def _announced(compiled: Any, formula: scalar.Formula, is_tight: bool, folder: Path | None) -> Callable[..., int]:
    """The compiled function; a call that compiles says so in the log, and to :func:`is_worth_compiling`."""

    def call(*args: Any) -> int:
        known = len(compiled.signatures)
        start = time.perf_counter()
        failed: int = compiled(*args)
        if len(compiled.signatures) > known:
            seconds = time.perf_counter() - start
            _logger.debug("Updates with the kernel %s: ready after %.1f s.", formula.__name__, seconds)
            code = _code_name(formula, is_tight, args[0].dtype)
            _is_ready[code] = True
            if folder is not None:
                with suppress(OSError):
                    (folder / code).touch()
        return failed

    return call


@contextmanager
def _cache_folder(config: Any) -> Iterator[Path | None]:
    """The folder of compiled code, as numba's own for the time of the block; None if no folder can be written."""
    before = config.CACHE_DIR
    folder = Path(before) if before else next((each for each in _folders() if _is_usable(each)), None)
    if folder is None:
        _logger.debug("Machine code is compiled in every process: no folder for it can be written.")
        yield None
        return
    config.CACHE_DIR = str(folder)
    try:
        yield folder
    finally:
        config.CACHE_DIR = before


def _places() -> Iterator[Path]:
    """Where compiled code may be, without importing numba."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    yield from [Path(chosen)] if chosen else (folder for folder in _folders() if folder.is_dir())


def _source_digest() -> str:
    modules = (scalar, native_algebra, native_block, native_tight, rules, tight_rule)
    files = [Path(module.__file__ or "") for module in modules]
    sources = [file.read_bytes() for file in (*files, files[1].with_name("native_exponential.py"))]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _folders() -> Iterator[Path]:
    """Folders for compiled code, best first. Their name changes with the source, so that old code is never used."""
    name = f"native-{_source_digest()}"
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA")
    else:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home:
        yield Path(home) / "ksm_lightning" / name
    if hasattr(os, "getuid"):
        yield Path(tempfile.gettempdir()) / f"ksm_lightning-{os.getuid()}" / name


def _is_usable(folder: Path) -> bool:
    """Whether compiled code can be stored there, and nobody else can: it is run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder, folder.parent):
            found = each.stat()
            if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH):
                return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
