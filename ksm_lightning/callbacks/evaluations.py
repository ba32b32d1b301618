"""Evaluations at validations and tests: their base class, a linear probe and KMeans."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor

from ksm_lightning.callbacks.progress_bar import updates_to_do
from ksm_lightning.data.datamodule import KSMDataModule, datamodule_of
from ksm_lightning.evaluation.clustering import kmeans, matched_accuracy
from ksm_lightning.evaluation.linear_probe import PENALTIES, Selection, linear_probe
from ksm_lightning.kernels import random_subset
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.readout import Readout, check_readout, feature_count, make_encoder
from ksm_lightning.runs import metric_names
from ksm_lightning.runs.metric_names import Stage
from ksm_lightning.runs.stop import StoppedEarly


class Evaluation(Callback):
    """Base class of evaluations: computes scores at validations and tests, and logs them.

    A subclass implements :meth:`evaluate`. An evaluation must not change the network or the global random state, so
    that a run with it is bitwise equal to a run without it. After a signal the run ends before and after an evaluation;
    a long one can read ``model.run_state.stop.is_set``.

    Args:
        min_updates_between: Minimum number of training updates between two evaluations; the end is always evaluated.
    """

    in_progress_bar = True

    def __init__(self, min_updates_between: int = 0) -> None:
        if type(self).evaluate is Evaluation.evaluate:  # `abstractmethod` has no effect on Lightning's Callback
            raise NotImplementedError(f"{type(self).__name__} must implement `evaluate`, which returns scores by name.")
        if min_updates_between < 0:
            raise ValueError(f"`min_updates_between` must not be negative, got {min_updates_between}.")
        self.min_updates_between = min_updates_between
        self.last_update: int | None = None

    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: Stage
    ) -> dict[str, float]:
        """Compute scores by metric name. Every process calls it."""
        raise NotImplementedError

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if datamodule_of(trainer) is None or not isinstance(pl_module, KernelSimilarityMatching):
            data = type(getattr(trainer, "datamodule", None)).__name__
            raise ValueError(
                f"{type(self).__name__} needs a KernelSimilarityMatching module and a datamodule of ksm_lightning, got "
                f"{type(pl_module).__name__} and {data}: use ArrayDataModule for your own data, or the "
                "functions in ksm_lightning.evaluation."
            )
        self.last_update = None  # that of an earlier run says nothing about this one

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and self._is_due(trainer):
            self._run(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._run(trainer, pl_module, "test")

    def _is_due(self, trainer: L.Trainer) -> bool:
        if trainer.state.fn != "fit":
            return True
        done, end = trainer.global_step, updates_to_do(trainer)
        is_last = end is not None and done >= end
        return self.last_update is None or done - self.last_update >= self.min_updates_between or is_last

    def _run(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        data = datamodule_of(trainer)
        assert data is not None
        assert isinstance(pl_module, KernelSimilarityMatching)
        pl_module.leave_if_stopped()
        scores = self.evaluate(trainer, pl_module, data, stage)
        pl_module.leave_if_stopped()  # the evaluation may have been left early
        self.last_update = trainer.global_step
        for name, value in scores.items():
            pl_module.log(name, value, prog_bar=self.in_progress_bar)


class ReadoutEvaluation(Evaluation):
    """Base class of evaluations of readouts, which may be compressed. Checks the number of features before the run.

    Args:
        readouts: The readouts to evaluate.
        num_features: Number of features of the readouts. Default: the number of neurons.
        min_updates_between: Minimum number of training updates between two evaluations; the end is always evaluated.
    """

    def __init__(self, readouts: Sequence[Readout], num_features: int | None, min_updates_between: int) -> None:
        super().__init__(min_updates_between)
        self.readouts = [check_readout(name) for name in readouts]
        self.num_features = num_features

    def count_for(self, readout: Readout) -> int | None:
        """The ``num_features`` of one of the readouts."""
        return self.num_features

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert isinstance(pl_module, KernelSimilarityMatching)
        for readout in self.readouts:
            pl_module.check_readout_fits(readout)
            feature_count(pl_module.network, readout, self.count_for(readout))


class LinearProbe(ReadoutEvaluation):
    """Logs ``val/probe_accuracy`` and ``test/probe_accuracy``: softmax regression on y with few labels per class.

    The penalty is selected on the validation labels, and ``test/probe_accuracy`` uses the test labels. If the network
    was also trained on the test images (the paper's protocol for MNIST), it was without their labels. Data without
    labels is skipped. Only the first process computes the probe.

    Args:
        labels_per_class: Labelled samples per class, at most the size of the smallest class.
        num_seeds: Number of random draws of labelled samples to average over.
        penalties: Penalties to select from.
        selection: ``validation`` selects on validation labels and reports on test labels; ``paper`` reports the best
            accuracy on the validation labels, as ``val/probe_accuracy`` only.
        readout: Features to probe: ``neural``, ``nystroem`` or ``least_squares``.
        min_updates_between: Minimum number of training updates between two evaluations; the end is always evaluated.
        num_features: Number of features of ``nystroem`` or ``least_squares``, at most the number of landmarks. Default:
            the number of neurons.
    """

    def __init__(
        self,
        labels_per_class: int = 100,
        num_seeds: int = 1,
        penalties: Sequence[float] = PENALTIES,
        selection: Selection = "validation",
        readout: Readout = "neural",
        min_updates_between: int = 5000,
        num_features: int | None = None,
    ) -> None:
        super().__init__([readout], num_features, min_updates_between)
        if labels_per_class < 1 or num_seeds < 1 or not penalties or min(penalties) <= 0:
            raise ValueError(
                "LinearProbe needs `labels_per_class` and `num_seeds` of at least 1 and positive `penalties`, got "
                f"{labels_per_class}, {num_seeds} and {list(penalties)}."
            )
        self.labels_per_class = labels_per_class
        self.num_seeds = num_seeds
        self.penalties = tuple(penalties)
        self.selection = selection
        self.readout = readout

    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: Stage
    ) -> dict[str, float]:
        if data.train_labels is None:
            return {}
        return _scores_of_first(model, lambda: self._scores(model, data))

    def _scores(self, model: KernelSimilarityMatching, data: KSMDataModule) -> dict[str, float]:
        sets = data.probe_sets()
        assert sets is not None
        sample = data.readout_sample(self.readout)
        encode = make_encoder(model.network_for(self.readout), self.readout, sample, self.num_features)
        smallest = int(torch.unique(sets["train"][1], return_counts=True)[1].min())
        probe = linear_probe(
            *(sets[name] for name in ("train", "validation", "test")),
            per_class=min(self.labels_per_class, smallest),
            seeds=range(self.num_seeds),
            penalties=self.penalties,
            selection=self.selection,
            encode=lambda x: encode(x.to(model.network.W)),
            check=model.leave_work,
        )
        scores = {metric_names.probe_accuracy("val"): probe.validation_accuracy}
        if self.selection == "validation":
            scores[metric_names.probe_accuracy("test")] = probe.accuracy
        return scores


class KMeansProbe(ReadoutEvaluation):
    """Logs ``val/kmeans_accuracy_x`` and ``val/kmeans_accuracy_y``: how well KMeans on x and on y finds the labels.

    There is one cluster per label, with the best matching of clusters to labels. Data without labels is skipped. Only
    the first process computes it.

    Args:
        starts: Number of random starts; the one with the least energy counts. The paper uses 100.
        max_points: Maximum number of points to cluster.
        readout: Features to cluster: ``neural``, ``nystroem`` or ``least_squares``.
        min_updates_between: Minimum number of training updates between two evaluations; the end is always evaluated.
        num_features: Number of features of ``nystroem`` or ``least_squares``, at most the number of landmarks. Default:
            the number of neurons.
    """

    in_progress_bar = False

    def __init__(
        self,
        starts: int = 10,
        max_points: int = 10_000,
        readout: Readout = "neural",
        min_updates_between: int = 10_000,
        num_features: int | None = None,
    ) -> None:
        super().__init__([readout], num_features, min_updates_between)
        if starts < 1 or max_points < 2:
            raise ValueError(
                f"KMeansProbe needs `starts` of at least 1 and `max_points` of at least 2, got {starts} and "
                f"{max_points}."
            )
        self.starts = starts
        self.readout = readout
        self.max_points = max_points
        self._of_inputs: dict[Stage, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._of_inputs = {}  # another run may have other data

    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: Stage
    ) -> dict[str, float]:
        labels = data.evaluation_labels(stage)
        if labels is None:
            return {}
        return _scores_of_first(model, lambda: self._scores(model, data, labels, stage))

    def _scores(
        self, model: KernelSimilarityMatching, data: KSMDataModule, labels: Tensor, stage: Stage
    ) -> dict[str, float]:
        x, chosen = evaluated_points(model, data, stage, self.max_points)
        classes, numbered = torch.unique(labels[chosen], return_inverse=True)
        y = model.features(x, self.readout, data.readout_sample(self.readout), self.num_features)
        count, check = min(len(classes), len(x)), model.leave_work

        def accuracy(features: Tensor) -> float:
            clusters = kmeans(features, count, starts=self.starts, check=check)
            return matched_accuracy(clusters.assignment, numbered)

        if stage not in self._of_inputs:  # they stay the same during a run
            self._of_inputs[stage] = accuracy(x)
        return {
            metric_names.kmeans_accuracy(stage, "x"): self._of_inputs[stage],
            metric_names.kmeans_accuracy(stage, "y"): accuracy(y),
        }


def _scores_of_first(model: KernelSimilarityMatching, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The scores that the first process computes, on all processes; none if a signal has ended the work."""

    def until_stopped() -> dict[str, float]:
        with suppress(StoppedEarly):
            return compute()
        return {}

    return model.compute_once(until_stopped)


def evaluated_points(
    model: KernelSimilarityMatching, data: KSMDataModule, stage: Stage, max_points: int
) -> tuple[Tensor, Tensor]:
    """A random but fixed subset (samples, m) of the points of a stage, and its indices."""
    points = data.evaluation_points(stage)
    chosen = random_subset(len(points), max_points)
    return points.take(chosen.to(points.device)).to(model.network.W), chosen
