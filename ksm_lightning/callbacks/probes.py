"""What labels say of the representation: a linear probe and KMeans."""

from collections.abc import Sequence

import lightning as L
import torch

from ksm_lightning.callbacks.evaluation import Evaluation
from ksm_lightning.data import KSMDataModule
from ksm_lightning.evaluation.clustering import kmeans, matched_accuracy
from ksm_lightning.evaluation.linear_probe import PENALTIES, Selection, linear_probe
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network.readout import Readout, check_readout, make_encoder


class LinearProbe(Evaluation):
    """Logs ``val/probe_accuracy`` and ``test/probe_accuracy``: softmax regression on y with few labels a class.

    The penalty is selected on validation labels and the accuracy reported on the test labels. Where the representation
    itself was trained on the test images (the paper's protocol for MNIST), it was without their labels. Data without
    labels is passed over. The first process computes it.

    Args:
        labels_per_class: Labelled samples a class, or as many as the smallest class has.
        num_seeds: Draws of labelled samples to average over.
        penalties: Penalties to select from.
        readout: The features that are probed: ``neural``, ``nystroem`` or ``least_squares``.
        selection: ``validation`` is honest; ``paper`` reports the best accuracy on the validation labels, as
            ``val/probe_accuracy`` alone.
        min_updates_between: During training, validations are skipped until so many updates have passed since the last
            evaluation; the end of the run never is.

    Raises:
        ValueError: If a number is impossible.
    """

    def __init__(
        self,
        labels_per_class: int = 100,
        num_seeds: int = 1,
        penalties: Sequence[float] = PENALTIES,
        selection: Selection = "validation",
        readout: Readout = "neural",
        min_updates_between: int = 5000,
    ) -> None:
        super().__init__(min_updates_between)
        if labels_per_class < 1 or num_seeds < 1 or not penalties or min(penalties) <= 0:
            raise ValueError(
                "A probe needs `labels_per_class` and `num_seeds` of at least 1 and positive `penalties`, got "
                f"{labels_per_class}, {num_seeds} and {list(penalties)}."
            )
        self.labels_per_class = labels_per_class
        self.num_seeds = num_seeds
        self.penalties = tuple(penalties)
        self.selection = selection
        self.readout = check_readout(readout)

    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: str
    ) -> dict[str, float]:
        if data.train_labels is None:
            return {}
        scores: dict[str, float] = {}
        if trainer.is_global_zero:
            sets = data.probe_sets()
            assert sets is not None
            read = make_encoder(model.network, self.readout, data.readout_sample(self.readout))
            smallest = int(torch.unique(sets["train"][1], return_counts=True)[1].min())
            found = linear_probe(
                *(sets[name] for name in ("train", "validation", "test")),
                per_class=min(self.labels_per_class, smallest),
                seeds=range(self.num_seeds),
                penalties=self.penalties,
                selection=self.selection,
                encode=lambda x: read(x.to(model.network.W)),
            )
            scores["val/probe_accuracy"] = found.validation_accuracy
            if self.selection == "validation":
                scores["test/probe_accuracy"] = found.accuracy
        return trainer.strategy.broadcast(scores)


class KMeansProbe(Evaluation):
    """Logs how well KMeans finds the labels in x and in y: ``val/kmeans_accuracy_x`` and ``val/kmeans_accuracy_y``.

    There are as many clusters as labels, matched to them as well as possible. Data without labels is passed over. The
    first process computes it.

    Args:
        readout: The features that are clustered: ``neural``, ``nystroem`` or ``least_squares``.
        starts: Random starts, of which the one with the least energy counts; the paper takes 100.
        max_points: Points to cluster at most.
        min_updates_between: During training, validations are skipped until so many updates have passed since the last
            evaluation; the end of the run never is.

    Raises:
        ValueError: If a number is impossible.
    """

    in_progress_bar = False

    def __init__(
        self,
        starts: int = 10,
        max_points: int = 10_000,
        readout: Readout = "neural",
        min_updates_between: int = 10_000,
    ) -> None:
        super().__init__(min_updates_between)
        if starts < 1 or max_points < 2:
            raise ValueError(f"KMeans needs `starts` of at least 1 and `max_points` of 2, got {starts}, {max_points}.")
        self.starts = starts
        self.readout = check_readout(readout)
        self.max_points = max_points

    def evaluate(
        self, trainer: L.Trainer, model: KernelSimilarityMatching, data: KSMDataModule, stage: str
    ) -> dict[str, float]:
        labels = data.evaluation_labels(stage)
        if labels is None:
            return {}
        scores: dict[str, float] = {}
        if trainer.is_global_zero:
            points = data.evaluation_points(stage)
            chosen = random_subset(len(points), self.max_points)
            x = points.take(chosen.to(points.device)).to(model.network.W)
            classes, numbered = torch.unique(labels[chosen], return_inverse=True)
            for name, features in (("x", x), ("y", model.features(x, self.readout, data.readout_sample(self.readout)))):
                found = kmeans(features, min(len(classes), len(x)), starts=self.starts)
                scores[f"{stage}/kmeans_accuracy_{name}"] = matched_accuracy(found.assignment, numbered)
        return trainer.strategy.broadcast(scores)
