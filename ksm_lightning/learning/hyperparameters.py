"""One description of the hyper-parameters: names, types, defaults, checks, and which of them a resumed run keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from ksm_lightning.kernels import AUTO, Auto, Kernel, chooses_width, make_kernel, with_width
from ksm_lightning.learning.acceleration import Acceleration
from ksm_lightning.learning.responses import Inverse
from ksm_lightning.learning.schedule import AdaptiveSchedule, PaperPhases, Phase, PhaseSchedule, make_schedule
from ksm_lightning.network import NETWORKS, PAPER_RIDGE, Bound, Initialiser, KSMNetwork, NormalInit, Solver

Init = Literal["normal", "data"]
Parallel = Literal["data", "neurons"]
_FIXED = {"is_fixed": True}


@dataclass(frozen=True)
class HyperParameters:
    """Everything that a user may choose about a network and its training.

    Unset values are filled in where the others determine them, so that a checkpoint holds what was used.

    Args:
        num_neurons: Number of neurons n, the dimension of the representation.
        bound: ``paper``, or ``tight``: a matrix Q from p landmarks to n neurons instead of gains q. Its error has no
            floor; the price is that responses are determined up to a rotation only, so the paper's sparse template
            tuning is lost. It learns best with batches of 1,024 points.
        num_landmarks: Number of landmarks p of the tight bound, at least n. Default: n.
        in_features: Number of input features m. Default: taken from the data when training starts.
        kernel: Registered name of the kernel: gaussian, laplacian, cauchy, linear, polynomial,
            offset_polynomial, power_cosine, arc_cosine, or your own.
        kernel_params: The kernel's parameters, such as ``{sigma: 0.3}``. Default: the kernel's defaults, and for a
            kernel with a width ``{sigma: auto}``, 0.7 times the median distance of two training points. A checkpoint
            holds the number.
        ridge: The paper's lambda, positive. Default: the paper's 0.001 with ``phases``; ``0.005 <f(x, x)> / n`` with
            the adaptive schedule, which does not depend on the scale of the similarity; a fiftieth of that with the
            tight bound.
        init: Start of W: ``normal`` is the paper's, ``data`` chooses data points by kernel k-means++, from which the
            adaptive schedule moves to KMeans-like centres; of the tight bound, some may be rare points.
        init_scale: Standard deviation of the normal start. The paper has 1, which loses neurons on half moons.
        solver: How responses are computed in validation and prediction: ``closed_form``, or ``dynamics`` to integrate
            the recurrent network until it settles.
        updates: Number of updates of the adaptive schedule. Default: 5000, or 1000 with the tight bound.
        phases: Phases of constant rates instead of the adaptive schedule: a list, or ``paper_half_moons``,
            ``paper_mnist`` or ``released_mnist``.
        consolidate: Whether a finished run ends with the best common scale of W (or q) and the exact L for all data.
            Default: true with the adaptive schedule, false with phases.
        inverse: How responses are computed in training: ``exact`` factorises L for every batch, ``tracked`` updates
            the inverse by low-rank corrections, ``auto`` chooses the faster one.
        acceleration: How updates run. ``auto`` uses machine code for small networks on the CPU where numba is
            installed, and torch operations otherwise, which ``none`` always uses. ``native`` uses machine code for any
            built-in kernel but offset_polynomial on the CPU; ``compile`` fuses the update with torch.compile, which
            needs a C++ compiler and about a minute at the start; ``cuda_graph`` records and replays 8 updates at a time
            on one GPU. The last two exist for the paper's bound only.

    Raises:
        ValueError: If a value is not allowed, or the kernel's name is not registered.
    """

    num_neurons: int = field(default=16, metadata=_FIXED)
    bound: Bound = field(default="paper", metadata=_FIXED)
    num_landmarks: int | None = field(default=None, metadata=_FIXED)
    in_features: int | None = field(default=None, metadata=_FIXED)
    kernel: str = field(default="gaussian", metadata=_FIXED)
    kernel_params: dict[str, float | Auto] | None = field(default=None, metadata=_FIXED)
    ridge: float | None = field(default=None, metadata=_FIXED)
    init: Init = "data"
    init_scale: float = 0.5
    solver: Solver = "closed_form"
    updates: int | None = None
    phases: list[Phase] | PaperPhases | None = None
    consolidate: bool | None = None
    inverse: Inverse = "auto"
    acceleration: Acceleration = "auto"
    parallel: Parallel = "data"

    def __post_init__(self) -> None:
        for each in fields(self):
            allowed = get_args(each.type)
            value = getattr(self, each.name)
            if allowed and all(isinstance(option, str) for option in allowed) and value not in allowed:
                raise ValueError(f"`{each.name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
        kernel, schedule = self.make_kernel(), self.make_schedule()
        for phase in schedule.phases if isinstance(schedule, PhaseSchedule) else ():
            kernel.with_params(**phase.kernel_params)
        is_natural = schedule.is_natural
        if self.bound == "tight" and self.acceleration in ("compile", "cuda_graph"):
            name = self.acceleration
            raise ValueError(
                f"`acceleration` {name} exists for the paper's bound only: set it to auto with bound=tight."
            )
        self._check_parallel()
        self._fill("num_landmarks", NETWORKS[self.bound].check_sizes(self.num_neurons, self.num_landmarks))
        self._fill("kernel_params", {**kernel.params(), **({"sigma": AUTO} if self.chooses_width else {})})
        self._fill("ridge", None if is_natural or self.ridge is not None else PAPER_RIDGE)
        self._fill("updates", schedule.total_updates if is_natural else None)
        self._fill("phases", schedule.as_primitives() if isinstance(schedule, PhaseSchedule) else None)
        self._fill("consolidate", is_natural if self.consolidate is None else None)
        # One neuron is enough to refuse impossible values.
        sizes = (1 if self.in_features is None else min(1, self.in_features), min(1, self.num_neurons))
        ridge = PAPER_RIDGE if self.ridge is None else self.ridge
        with torch.device("cpu"):
            KSMNetwork(kernel, *sizes, ridge, NormalInit(self.init_scale), self.solver, torch.Generator())

    def _check_parallel(self) -> None:
        if self.parallel == "data":
            return
        needed = {"bound": ("paper",), "solver": ("closed_form",), "acceleration": ("auto", "none")}
        for name, values in needed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"`parallel` neurons needs {name}={values[0]}, got {getattr(self, name)}: change it, or set "
                    "`parallel` to data."
                )

    def _fill(self, name: str, value: Any) -> None:
        if value is not None:
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "HyperParameters":
        """From the hyper-parameters of a model, which may have more of its own."""
        return cls(**{name: options[name] for name in cls.names()})

    @classmethod
    def names(cls) -> list[str]:
        """All names, which are those that a checkpoint holds."""
        return [each.name for each in fields(cls)]

    @classmethod
    def fixed_names(cls) -> list[str]:
        """Names that define the network: a resumed run may not change them."""
        return [each.name for each in fields(cls) if each.metadata.get("is_fixed")]

    @classmethod
    def check_same_network(cls, wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raise ValueError if a model's value of one of :meth:`fixed_names` is set and differs from the saved one."""
        for name in cls.fixed_names():
            if not _agrees(wanted[name], saved[name]):
                raise ValueError(
                    f"The checkpoint has {name}={saved[name]}, but the model has {wanted[name]}: remove `{name}`, or "
                    "train a new network."
                )

    def as_primitives(self) -> dict[str, Any]:
        """All values as plain Python values, for checkpoints."""
        return {name: getattr(self, name) for name in self.names()}

    @property
    def chooses_width(self) -> bool:
        """Whether the width of the kernel is still to be chosen from the data."""
        return chooses_width(self.kernel, self.kernel_params)

    def make_kernel(self) -> Kernel:
        """The kernel. A width that is still to be chosen is 1."""
        return make_kernel(self.kernel, **with_width(self.kernel, self.kernel_params, 1.0))

    def make_schedule(self) -> PhaseSchedule | AdaptiveSchedule:
        return make_schedule(self.phases, self.updates, self.bound)

    def make_network(
        self, in_features: int, init: Initialiser | None = None, generator: torch.Generator | None = None
    ) -> KSMNetwork:
        """A network for inputs of this size; ``init`` is the normal start by default.

        An unset ridge is the paper's until the learner has seen data.
        """
        ridge = PAPER_RIDGE if self.ridge is None else self.ridge
        init = NormalInit(self.init_scale) if init is None else init
        return NETWORKS[self.bound](
            self.make_kernel(), in_features, self.num_neurons, ridge, init, self.solver, generator, self.num_landmarks
        )


def _agrees(wanted: Any, saved: Any) -> bool:
    """Whether a value is unset or equal to the saved one; a width that is to be chosen agrees with any number."""
    if isinstance(wanted, Mapping) and isinstance(saved, Mapping) and wanted.get("sigma") == AUTO:
        wanted = {**wanted, "sigma": saved.get("sigma")}
    return wanted is None or bool(wanted == saved)
