"""The variants of the ablation: each turns a mechanism off or changes a constant, by patches of attributes.

A patch names an attribute as ``module:attribute``, below the package, and its new value. ``module!attribute`` changes
it in this module alone, and not in those that import it. A value :class:`From` is computed from the old one.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

Patch = tuple[str, Any]


class From(NamedTuple):
    """A new value that depends on the old one."""

    change: Callable[[Any], Any]


class Variant(NamedTuple):
    """Changes of the code that are measured together."""

    name: str
    meaning: str
    patches: tuple[Patch, ...]
    touches: tuple[str, ...] = ()  # what it can change: parts, bounds, or a part and a bound. Default: all
    is_readout: bool = False  # on the board, it changes readouts alone, and one fit is enough

    def may_change(self, part: str, bound: str) -> bool:
        """Whether runs of a part of the panel with a bound can change. The board counts by itself."""
        names = {part} if part == "board" else {part, bound, f"{part} {bound}"}
        names |= {"paper", "tight", "streams"} if bound == "any" else set()
        return not self.touches or not names.isdisjoint(self.touches)


def variant(name: str, meaning: str, touches: str, *patches: Patch) -> Variant:
    """A variant that touches these parts or bounds, separated by commas."""
    return Variant(name, meaning, patches, tuple(part.strip() for part in touches.split(",") if part.strip()))


UNCHANGED = Variant("unchanged", "the code as it is", ())
SEEDED = "half moons, stress, streams, kernels, mnist"  # not random fits, whose data would differ
OTHER_SEEDS = tuple(
    variant(f"other seeds {index}", "what chance alone changes", SEEDED, ("ablation_panel!FIRST_SEED", 100 * index))
    for index in (1, 2)
)


def times(factor: float) -> From:
    return From(lambda old: type(old)(factor * old))


def every(factor: float) -> From:
    """All values of a dictionary, multiplied."""
    return From(lambda old: {key: factor * value for key, value in old.items()})


def returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


def scaled(factor: float) -> From:
    """A function that returns numbers, multiplied."""
    return From(lambda old: lambda *args: int(factor * old(*args)))


def moving_if(condition: Callable[[dict[str, Any]], bool]) -> From:
    """`Learner._move_if_better` for some options only: those of the start and of runs differ."""

    def change(old: Callable[..., None]) -> Callable[..., None]:
        def move(self: Any, *args: Any, **options: Any) -> None:
            if condition(options):
                old(self, *args, **options)

        return move

    return From(change)


def always_moving(self: Any, x: Any, error: Any, now: Any = None, **options: Any) -> None:
    self.move_idle_landmarks(x, **options)


def measuring_only(self: Any, network: Any, tolerance: float) -> bool:
    self.compare(network)
    return False


def without_halving(old: Callable[..., Any]) -> Callable[..., Any]:
    def rates(self: Any, *args: Any) -> Any:
        self.step_factor = 1.0
        return old(self, *args)

    return rates


def forgetting(self: Any, kernel: Any, W: Any, Q: Any) -> None:
    self._own = None


def without_rebalance(old: Callable[..., None]) -> Callable[..., None]:
    def revise(self: Any, learner: Any) -> None:
        self._rebalance = returning(None)
        old(self, learner)
        del self._rebalance

    return revise


NO_INDICES = returning(torch.empty(0, dtype=torch.int64))
LEARNER, BEST, UNITS, START = "learning.learner", "learning.best", "learning.units", "network.initialisation"
RULES, TIGHT, SCHEDULE, MOVES = "learning.rules", "learning.tight_rule", "learning.schedule", "learning.relocation"
STREAM, STEPS = "learning.stream", "learning.stream_schedule"
READOUT, RARE = "network.readout_matrices", "network.rare_points"
BOTH, FITS = "paper, tight", "paper, tight, board"

LEARNING = (
    variant("relocation in runs off", "idle landmarks stay where they are after the start", BOTH,
            (f"{LEARNER}:Learner._move_if_better", moving_if(lambda options: "collectives" not in options))),
    variant("relocation at start off", "idle landmarks are not moved before the first update", BOTH,
            (f"{LEARNER}:Learner._move_if_better", moving_if(lambda options: "collectives" in options))),
    variant("moves not undone", "moves count even if the error of the landmarks rises", BOTH,
            (f"{LEARNER}:Learner._move_if_better", always_moving)),
    variant("best weights off", "a run ends with its last weights", BOTH,
            (f"{BEST}:BestWeights.restore", returning(False))),
    variant("return off", "a run never returns to its best weights before its end, and never halves steps", BOTH,
            (f"{BEST}:BestWeights.return_if_worse", measuring_only)),
    variant("step halving off", "steps stay as they are after a return to the best weights", BOTH,
            (f"{LEARNER}:Learner._rates", From(without_halving))),
    variant("held-out judges off", "all points are learned from and judge; no pivots, which need judges", FITS,
            (f"{UNITS}:held_out_count", returning(0))),
    variant("pivots off", "all first landmarks are means", "tight, board", (f"{START}:_PIVOT_SHARES", ())),
    variant("Lloyd off", "first landmarks are drawn points; no pivots", FITS, ("learning.training:_REFINEMENT", 0)),
    variant("Lloyd 2", "2 iterations instead of 10", FITS, ("learning.training:_REFINEMENT", 2)),
    variant("heavy points off", "points of large f(x, x) are ordinary ones", "mnist tight, board",
            (f"{RARE}:heaviest", NO_INDICES)),
    variant("GAIN_FLOOR 0", "", "paper", (f"{RULES}:GAIN_FLOOR", 0.0)),
    variant("TRUST off", "steps of W have any length", "paper", (f"{RULES}:TRUST", 1e6)),
    variant("RESPONSE_LIMIT off", "responses have any length", BOTH,
            (f"{RULES}:NaturalRule.response_limit", None), (f"{TIGHT}:TightRule.response_limit", None)),
    variant("shrinkage off", "scale and L are those of the sample alone", FITS,
            (f"{UNITS}:shrinkage_for", returning(0.0))),
    variant("tracked inverse off", "L is factorised in every update", "mnist paper",
            ("learning.responses:ResponseSolver.is_worth_tracking", returning(False))),
    variant("best: landmarks' floor off", "good landmarks count in full", "paper", (f"{BEST}:_SMALL", 0.0)),
    variant("best: margin off", "weights with slightly better landmarks are replaced, too", "paper",
            (f"{BEST}:_MARGIN", 1.0)),
    variant("comparisons 1.0", "a run for landmarks returns if they are worse at all", "half moons",
            (f"{LEARNER}:_CLEARLY_WORSE", 1.0)),
    variant("comparisons at searches only", "", "half moons", (f"{LEARNER}:_BETWEEN_COMPARISONS", 10**9)),
    variant("carry-along off", "Q stays as it is when landmarks have moved", "tight",
            (f"{TIGHT}:TightRule.after", forgetting)),
    variant("direction floor off", "tight_rule._FLOOR 0", "tight", (f"{TIGHT}:_FLOOR", 0.0)),
    variant("batch's own Q", "_BATCH_WEIGHT 0", "tight", (f"{TIGHT}:_BATCH_WEIGHT", 0.0)),
    variant("network's Q", "_BATCH_WEIGHT large", "tight", (f"{TIGHT}:_BATCH_WEIGHT", 1e9)),
    variant("memory 0", "directions are not averaged", "tight", (f"{TIGHT}:_MEMORY", 0.0)),
    variant("memory 0.8", "", "tight", (f"{TIGHT}:_MEMORY", 0.8)),
    variant("memory 0.95", "", "tight", (f"{TIGHT}:_MEMORY", 0.95)),
    variant("one memory", "_MEMORY_OF_LENGTH 0.9, as _MEMORY", "tight", (f"{TIGHT}:_MEMORY_OF_LENGTH", 0.9)),
    variant("lengths kept off", "steps may lengthen landmarks of homogeneous kernels", "mnist tight",
            (f"{TIGHT}:keeps_lengths", returning(False))),
    variant("_HOLD 0", "steps decrease from the start", BOTH, (f"{SCHEDULE}:AdaptiveSchedule._HOLD", 0.0)),
    variant("_FINAL 0", "steps decrease to 0", BOTH,
            (f"{SCHEDULE}:AdaptiveSchedule._FINAL", 0.0), (f"{SCHEDULE}:TightSchedule._FINAL_Q", 0.0)),
    variant("_FINAL_Q as _FINAL", "", "tight", (f"{SCHEDULE}:TightSchedule._FINAL_Q", 0.02)),
    variant("_RATIO 1", "W and q take the same steps as L", "paper", (f"{SCHEDULE}:AdaptiveSchedule._RATIO", 1.0)),
    variant("_MARGIN 0", "", BOTH, (f"{SCHEDULE}:AdaptiveSchedule._MARGIN", 0.0)),
    variant("_LARGEST off", "L's step is at most 0.75 for any batch", "paper",
            (f"{SCHEDULE}:AdaptiveSchedule._LARGEST", 1.0)),
    variant("tight _LARGEST off", "", "tight", (f"{SCHEDULE}:TightSchedule._LARGEST", 1.0)),
    variant("tight _LARGEST as the paper's", "0.1", "tight", (f"{SCHEDULE}:TightSchedule._LARGEST", 0.1)),
    variant("small batches' steps off", "_SAMPLES_PER_NEURON 0", "tight",
            (f"{SCHEDULE}:TightSchedule._SAMPLES_PER_NEURON", 1e-9)),
    variant("3 searches", "instead of 11 in a run of the paper's bound", "paper",
            (f"{SCHEDULE}:AdaptiveSchedule._RELOCATIONS", (0.2, 0.5, 0.8))),
    variant("_WORTHWHILE 0", "any gain is worth a move", BOTH, (f"{MOVES}:_WORTHWHILE", 0.0)),
    variant("_ADVANTAGE 1", "any advantage is worth a move", BOTH,
            (f"{MOVES}:relocate.__wrapped__.__kwdefaults__", From(lambda old: old | {"advantage": 1.0}))),
)  # fmt: skip
STREAMS = tuple(
    variant(f"stream: {name}", meaning, "streams", *patches)
    for name, meaning, *patches in (
        ("moves off", "idle landmarks stay where they are between restarts", (f"{STREAM}:_ADVANTAGE", math.inf)),
        ("_ADVANTAGE 1.2", "as in runs", (f"{STREAM}:_ADVANTAGE", 1.2)),
        ("_WORTHWHILE 0", "", (f"{MOVES}:_WORTHWHILE", 0.0)),
        ("revisions off", "no moves, no exact L, no return", (f"{STREAM}:Stream._revise", returning(None))),
        ("exact L off", "at revisions", (f"{STREAM}:Stream._revise", From(without_rebalance))),
        ("return off", "never to the landmarks of the last revision",
         (f"{STREAM}:Stream._better_than", returning(None))),
        ("restarts off", "one start only", (f"{STREAM}:Stream._restarts", returning(False))),
        ("rehearsal off", "no updates on the remembered samples",
         (f"{STREAM}:_REHEARSAL", 0), (f"{STREAM}:_TIGHT_REHEARSAL", 0)),
        ("limit_responses off", "", (f"{STREAM}!limit_responses", returning(None))),
        ("limit_readout off", "", (f"{STREAM}!limit_readout", lambda kernel, W, M: M)),
        ("landmarks in samples off", "of readouts", (f"{STREAM}!with_landmarks", lambda kernel, W, x: x)),
        ("_POWER 0.5", "", (f"{STEPS}:StreamSchedule._POWER", 0.5), (f"{STEPS}:TightStreamSchedule._POWER", 0.5)),
        ("_POWER 1", "", (f"{STEPS}:StreamSchedule._POWER", 1.0), (f"{STEPS}:TightStreamSchedule._POWER", 1.0)),
        ("_POWER_L 0.75", "", (f"{STEPS}:StreamSchedule._POWER_L", 0.75)),
    )
)  # fmt: skip
READOUTS = tuple(
    variant(f"readout: {name}", meaning, f"board, {more}", (target, value))._replace(is_readout=True)
    for name, meaning, more, target, value in (
        ("_LIMIT off", "features have any length", "", f"{READOUT}:_LIMIT", math.inf),
        ("ridge 0", "", "streams", f"{READOUT}:LEAST_SQUARES_RIDGE", 0.0),
        ("ridge 1e-4", "", "streams", f"{READOUT}:LEAST_SQUARES_RIDGE", 1e-4),
        ("ridge 1e-2", "", "streams", f"{READOUT}:LEAST_SQUARES_RIDGE", 1e-2),
        ("weights of landmarks 0", "landmarks are not points of the sample", "",
         f"{RARE}:weights_of_landmarks", lambda kernel, W, x: x.new_zeros(len(W))),
        ("never Nystroem", "_CLEARLY 0", "", f"{READOUT}:_CLEARLY", 0.0),
        ("points_at off", "points at landmarks are ordinary ones", "", f"{RARE}:points_at", NO_INDICES),
        ("heavy points off", "", "", f"{RARE}:heaviest", NO_INDICES),
        ("2,750 samples", "_READOUT_SAMPLES / 2", "", "sklearn.settings:_READOUT_SAMPLES", 2750),
        ("10,000 samples", "", "", "sklearn.settings:_READOUT_SAMPLES", 10_000),
    )
)  # fmt: skip
# Constants that are halved and doubled, by what they touch.
CONSTANTS = {
    "paper": (f"{RULES}:GAIN_FLOOR", f"{RULES}:TRUST", f"{RULES}:NaturalRule.response_limit",
              f"{SCHEDULE}:AdaptiveSchedule._RATIO", f"{SCHEDULE}:AdaptiveSchedule._LARGEST"),
    "tight": (f"{TIGHT}:TightRule.response_limit", f"{TIGHT}:_FLOOR", f"{TIGHT}:_BATCH_WEIGHT",
              f"{SCHEDULE}:TightSchedule._LARGEST", f"{SCHEDULE}:TightSchedule._STEP_W",
              f"{SCHEDULE}:TightSchedule._SAMPLES_PER_NEURON"),
    BOTH: (f"{SCHEDULE}:AdaptiveSchedule._HOLD", f"{SCHEDULE}:AdaptiveSchedule._FINAL",
           f"{SCHEDULE}:AdaptiveSchedule._STEP_L"),
    "streams": (f"{STREAM}:_ADVANTAGE", f"{STREAM}:_REHEARSAL", f"{STREAM}:_TIGHT_REHEARSAL", f"{STREAM}:_COLLECTED",
                f"{STEPS}:StreamSchedule._HOLD_SAMPLES", f"{STEPS}:TightStreamSchedule._HOLD_SAMPLES"),
}  # fmt: skip
SPECIAL = (
    variant("_GROWTH 1.1", "revisions twice as often", "streams", (f"{STREAM}:_GROWTH", 1.1)),
    variant("_GROWTH 1.44", "revisions half as often", "streams", (f"{STREAM}:_GROWTH", 1.44)),
    variant("_RELATIVE_RIDGE / 2", "", BOTH, (f"{UNITS}:_RELATIVE_RIDGE", every(0.5))),
    variant("_RELATIVE_RIDGE x 2", "", BOTH, (f"{UNITS}:_RELATIVE_RIDGE", every(2.0))),
    variant("sample_size / 2", "points of the search for idle landmarks", BOTH, (f"{UNITS}:sample_size", scaled(0.5))),
    variant("sample_size x 2", "", BOTH, (f"{UNITS}:sample_size", scaled(2.0))),
    variant("judge_count / 2", "", FITS, (f"{UNITS}:judge_count", scaled(0.5))),
)
GROUPS = (
    ("relocation off", ("relocation in runs off", "relocation at start off")),
    ("best weights, return off", ("best weights off", "return off")),
    ("relocation, best weights, return off", ("relocation off", "best weights, return off")),
    ("GAIN_FLOOR, TRUST off", ("GAIN_FLOOR 0", "TRUST off")),
    ("all limits off", ("GAIN_FLOOR 0", "TRUST off", "RESPONSE_LIMIT off")),
    ("one memory, no floor", ("one memory", "direction floor off")),
    ("memory 0, batch's own Q", ("memory 0", "batch's own Q")),
    ("tight: plain steps", (
        "memory 0", "batch's own Q", "carry-along off", "direction floor off", "lengths kept off",
        "_FINAL_Q as _FINAL", "tight _LARGEST as the paper's")),
    ("all candidates off", (
        "tight: plain steps", "all limits off", "return off", "best: margin off", "_FINAL 0", "stream: return off",
        "stream: limit_responses off", "stream: _POWER_L 0.75")),
    ("3 searches, moves not undone", ("3 searches", "moves not undone")),
    ("stream: both limits off", ("stream: limit_responses off", "stream: limit_readout off")),
    ("stream: moves, return off", ("stream: moves off", "stream: return off")),
    ("readout: ridge 0, _LIMIT off", ("readout: ridge 0", "readout: _LIMIT off")),
    ("readout: landmarks off in all", ("readout: weights of landmarks 0", "readout: points_at off")),
    ("readout: plain least squares", (
        "readout: _LIMIT off", "readout: weights of landmarks 0", "readout: never Nystroem", "readout: points_at off")),
)  # fmt: skip


def constant_variants() -> Iterable[Variant]:
    for touches, targets in CONSTANTS.items():
        for target in targets:
            name = f"{'tight ' if 'ight' in target else ''}{target.rpartition('.')[2].rpartition(':')[2]}"
            name = f"stream: {name}" if touches == "streams" else name
            yield variant(f"{name} / 2", "", touches, (target, times(0.5)))
            yield variant(f"{name} x 2", "", touches, (target, times(2.0)))


def all_variants() -> dict[str, Variant]:
    """All variants by name, mechanisms first, then groups, then constants."""
    found = {variant.name: variant for variant in (*OTHER_SEEDS, *LEARNING, *STREAMS, *READOUTS)}
    for name, members in GROUPS:
        of = [found[member] for member in members]
        touches = () if not all(each.touches for each in of) else tuple({part for each in of for part in each.touches})
        patches = tuple(patch for each in of for patch in each.patches)
        found[name] = Variant(name, " + ".join(members), patches, touches, all(each.is_readout for each in of))
    return found | {variant.name: variant for variant in (*SPECIAL, *constant_variants())}
