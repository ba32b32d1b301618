"""Evaluations, figures and the progress bar in a training run."""

import io
import re

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from helpers import references
from helpers.runs import model, moons, trainer
from ksm_lightning.callbacks import (
    Evaluation,
    Figures,
    KernelErrorEvaluation,
    KMeansProbe,
    LinearProbe,
    UpdateCheckpoint,
    UpdateProgressBar,
)
from ksm_lightning.data import ArrayDataModule, DigitsDataModule
from ksm_lightning.evaluation.clustering import kmeans, matched_accuracy
from ksm_lightning.evaluation.kernel_error import KernelNRMSE, kernel_nrmse
from ksm_lightning.evaluation.linear_probe import linear_probe
from ksm_lightning.kernels import random_subset
from ksm_lightning.learning import Phase
from ksm_lightning.network.readout import read_out


def test_kernel_error_is_that_of_all_points():
    module, data = model(phases=[Phase(30)]), moons(eval_batch_size=64)
    run = trainer([KernelErrorEvaluation()])
    run.fit(module, datamodule=data)
    x = data.train_points.data
    F = references.gram("gaussian", {"sigma": 0.3}, x, x)
    expected = references.nrmse(F, module(x))
    assert run.callback_metrics["val/kernel_nrmse"].item() == pytest.approx(expected, rel=1e-5)
    assert run.validate(module, datamodule=data, verbose=False)[0]["val/kernel_nrmse"] == pytest.approx(
        expected, rel=1e-5
    )


def test_the_kernel_error_is_that_of_the_compressed_readouts():
    module, data = model(phases=[Phase(30)]), moons()
    trainer().fit(module, datamodule=data)
    x = data.train_points.data
    F = references.gram("gaussian", {"sigma": 0.3}, x, x)
    evaluation = KernelErrorEvaluation(["neural", "nystroem", "least_squares"], num_features=3)
    (scores,) = trainer([evaluation]).validate(module, datamodule=data, verbose=False)
    assert scores["val/kernel_nrmse"] == pytest.approx(references.nrmse(F, module(x)), rel=1e-4)
    U, values, _ = torch.linalg.svd(module.features(x, "nystroem").double(), full_matrices=False)
    compressed = {
        "nystroem": U[:, :3] * values[:3],
        "least_squares": module.features(x, "least_squares", x, num_features=3),  # limited after the compression
    }
    for readout, features in compressed.items():
        expected = references.nrmse(F, features)
        assert scores[f"val/kernel_nrmse_{readout}"] == pytest.approx(expected, rel=1e-4)
        assert expected > 1.05 * references.nrmse(F, module.features(x, readout))


def test_the_probes_use_the_compressed_readout():
    module, data = model(phases=[Phase(60)]), moons(num_points=400)
    options = {"readout": "nystroem", "num_features": 1}
    run = trainer([LinearProbe(labels_per_class=30, **options), KMeansProbe(starts=5, **options)])
    run.fit(module, datamodule=data)
    x, sets = data.train_points.data, data.probe_sets()

    def encode(points):
        return read_out(module.network, "nystroem", points, sample=x, num_features=1)

    found = linear_probe(*sets.values(), per_class=30, seeds=range(1), encode=encode)
    assert run.callback_metrics["val/probe_accuracy"].item() == pytest.approx(found.validation_accuracy)
    expected = matched_accuracy(kmeans(encode(x), 2, starts=5).assignment, data.train_labels)
    assert run.callback_metrics["val/kmeans_accuracy_y"].item() == pytest.approx(expected)
    whole = linear_probe(*sets.values(), per_class=30, seeds=range(1), encode=lambda x: module.features(x, "nystroem"))
    assert whole.validation_accuracy > found.validation_accuracy


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (lambda: KernelErrorEvaluation(num_features=7), "between 1 and the number of landmarks, 6, got 7"),
        (lambda: LinearProbe(readout="nystroem", num_features=0), "between 1 and the number of landmarks, 6, got 0"),
        (lambda: KMeansProbe(num_features=5), "The neural readout always has 6 features, one per neuron"),
    ],
)
def test_impossible_numbers_of_features_are_refused_before_the_first_update(evaluation, message):
    module = model()
    before = module.network.W.detach().clone()
    with pytest.raises(ValueError, match=message):
        trainer([evaluation()]).fit(module, datamodule=moons())
    assert torch.equal(module.network.W, before)


def test_the_probes_log_the_results_of_the_functions():
    module, data = model(phases=[Phase(60)]), moons(num_points=400)
    run = trainer([LinearProbe(labels_per_class=30, num_seeds=2), KMeansProbe(starts=5)])
    run.fit(module, datamodule=data)
    sets = data.probe_sets()
    found = linear_probe(*sets.values(), per_class=30, seeds=range(2), encode=module)
    assert run.callback_metrics["val/probe_accuracy"].item() == pytest.approx(found.validation_accuracy)
    assert run.callback_metrics["test/probe_accuracy"].item() == pytest.approx(found.accuracy)
    x = data.train_points.data
    for name, features in (("x", x), ("y", module(x))):
        expected = matched_accuracy(kmeans(features, 2, starts=5).assignment, data.train_labels)
        assert run.callback_metrics[f"val/kmeans_accuracy_{name}"].item() == pytest.approx(expected)
    assert not set(sets["train"][0][:, 0].tolist()) & set(sets["validation"][0][:, 0].tolist())


def test_validate_repeats_the_last_scores_of_fit():
    module, data = model(phases=[Phase(60)]), moons()
    evaluations = [KernelErrorEvaluation(), LinearProbe(labels_per_class=30), KMeansProbe()]
    run = trainer(evaluations)
    run.fit(module, datamodule=data)
    last = {name: value.item() for name, value in run.callback_metrics.items()}
    (again,) = trainer(evaluations).validate(module, datamodule=data, verbose=False)
    assert set(again) == {"val/energy", "val/kernel_nrmse", "val/kernel_nrmse_nystroem", "val/probe_accuracy",
                          "test/probe_accuracy", "val/kmeans_accuracy_x", "val/kmeans_accuracy_y"}  # fmt: skip
    for name, value in again.items():
        assert value == pytest.approx(last[name], rel=1e-6), name


def test_evaluations_keep_their_interval_and_always_evaluate_the_end():
    module, steps = model(phases=[Phase(70)]), []

    class Spy(KernelErrorEvaluation):
        def evaluate(self, trainer, *args):
            steps.append(trainer.global_step)
            return super().evaluate(trainer, *args)

    trainer([Spy(min_updates_between=25)]).fit(module, datamodule=moons(updates_per_epoch=10))
    assert steps == [10, 40, 70]


def test_data_without_labels_is_skipped(tmp_path):
    np.save(tmp_path / "x.npy", np.random.RandomState(0).randn(40, 2))
    run = trainer([KernelErrorEvaluation(["neural"]), LinearProbe(), KMeansProbe()])
    run.fit(model(phases=[Phase(10)]), datamodule=ArrayDataModule(str(tmp_path / "x.npy")))
    assert {name for name in run.callback_metrics if "/" in name} == {"train/energy", "val/energy", "val/kernel_nrmse"}


def test_the_smallest_class_limits_the_labels_per_class(tmp_path):
    rng = np.random.RandomState(0)
    np.savez(tmp_path / "x.npz", x=rng.randn(60, 2), label=np.repeat([1, 5, 9], [40, 12, 8]))
    module, data = model(phases=[Phase(10)]), ArrayDataModule(str(tmp_path / "x.npz"), key="x", labels="label")
    run = trainer([LinearProbe(labels_per_class=100, num_seeds=2)])
    run.fit(module, datamodule=data)
    sets = data.probe_sets()
    smallest = min((sets["train"][1] == label).sum().item() for label in (1, 5, 9))
    assert 0 < smallest < 8
    found = linear_probe(*sets.values(), per_class=smallest, seeds=range(2), encode=module)
    assert run.callback_metrics["val/probe_accuracy"].item() == pytest.approx(found.validation_accuracy)


def test_evaluations_of_another_datamodule_are_refused():
    loader = torch.utils.data.DataLoader(torch.zeros(8, 2))
    with pytest.raises(ValueError, match=r"KernelErrorEvaluation needs .* got KernelSimilarityMatching and NoneType"):
        trainer([KernelErrorEvaluation()]).fit(model(), loader)


def test_final_scores_are_logged_with_the_hyper_parameters(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run", default_hp_metric=False)
    run = trainer([KernelErrorEvaluation(), LinearProbe(labels_per_class=20)], logger)
    run.fit(model(phases=[Phase(30)]), datamodule=moons())
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    for name, metric in (("final/kernel_nrmse", "val/kernel_nrmse"), ("final/probe_accuracy", "test/probe_accuracy")):
        (scalar,) = events.Scalars(name)
        assert scalar.value == pytest.approx(run.callback_metrics[metric].item(), rel=1e-6)
        assert scalar.step == 30, "the last update"
    content = events.summary_metadata["_hparams_/experiment"].plugin_data.content
    columns = [info.name for info in HParamsPluginData.FromString(content).experiment.hparam_infos]
    assert columns[:3] == ["kernel", "kernel_params/sigma", "num_neurons"]
    assert "updates" not in columns, "it is not set"


def test_the_test_error_uses_the_test_points():
    module, data = model(), moons()
    x = data.test_points.data
    expected = references.nrmse(references.gram("gaussian", {"sigma": 0.3}, x, x), module(x))
    result = trainer([KernelErrorEvaluation()]).test(module, datamodule=data, verbose=False)[0]
    assert result["test/kernel_nrmse"] == pytest.approx(expected, rel=1e-5)


def test_figures_are_written_to_files_and_to_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    module = model(phases=[Phase(30), Phase(20)])
    trainer([Figures(every_n_updates=20, num_neurons=2)], logger).fit(module, datamodule=moons())
    names = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    tuned = {name for name in names if re.fullmatch(r"tuning_\d\.png", name)}
    assert len(tuned) == 2
    panels = {"overview", "features", "similarities", "spectra", "responses", "energy"}
    assert names - tuned == {f"{panel}.png" for panel in panels}
    for name in names:
        picture = imread(tmp_path / "run" / "figures" / name)[..., :3]
        assert picture.shape[0] > 300
        assert picture.std() > 0.05  # not blank
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0, "histograms": 0}).Reload()
    assert [image.step for image in events.Images("figures/overview")] == [20, 40, 50]
    assert [image.step for image in events.Images("figures/energy")] == [50]
    assert [event.step for event in events.Histograms("responses")] == [20, 40, 50]
    assert [event.step for event in events.Scalars("train/energy")] == list(range(5, 51, 5))


def test_a_failing_figure_does_not_stop_the_run(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise np.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr("ksm_lightning.callbacks.run_figures.portrait_arrays", fail)
    run = trainer([Figures()], TensorBoardLogger(tmp_path, name="", version="run"))
    with pytest.warns(UserWarning, match="The figures could not be drawn: not positive definite"):
        run.fit(model(phases=[Phase(10)]), datamodule=moons())
    assert run.global_step == 10


def test_image_data_gets_grids_of_landmarks_and_filters(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    module = model(in_features=64, kernel="power_cosine", kernel_params={"alpha": 3}, phases=[Phase(5)])
    trainer([Figures(max_points=100)], logger).fit(module, datamodule=DigitsDataModule(seed=0))
    assert (tmp_path / "run" / "figures" / "weights.png").is_file()
    assert (tmp_path / "run" / "figures" / "linearised.png").is_file()


def test_the_energy_curve_is_restored_with_a_checkpoint():
    callback = Figures()
    callback._updates, callback._energies = [5, 10], [1.0, 0.5]
    restored = Figures()
    restored.load_state_dict(callback.state_dict())
    assert (restored._updates, restored._energies) == ([5, 10], [1.0, 0.5])


def test_the_progress_bar_counts_updates_and_shows_the_energy(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    trainer([UpdateProgressBar(refresh_rate=10), KernelErrorEvaluation()]).fit(
        model(phases=[Phase(100)]), datamodule=moons(updates_per_epoch=40)
    )
    text = out.getvalue()
    assert "100/100" in text
    assert re.search(r"\d updates/s, energy=-?\d", text)
    assert re.search(r"kernel_nrmse=\d", text)
    assert "v_num" not in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KernelErrorEvaluation(max_points=0), "`max_points` must be at least 1"),
        (lambda: KernelErrorEvaluation(min_updates_between=-1), "`min_updates_between` must not be negative"),
        (lambda: LinearProbe(labels_per_class=0), "`labels_per_class` and `num_seeds` of at least 1"),
        (lambda: LinearProbe(penalties=[0.0]), "positive `penalties`"),
        (lambda: KMeansProbe(starts=0), "`starts` of at least 1"),
        (lambda: Figures(max_points=1), "`max_points` of at least 2"),
        (lambda: UpdateCheckpoint(every_n_updates=0), "`every_n_updates` must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_evaluation_without_evaluate_is_refused():
    class Incomplete(Evaluation):
        pass

    with pytest.raises(NotImplementedError, match="Incomplete must implement `evaluate`"):
        Incomplete()


def test_a_user_defined_evaluation_is_logged():
    class Norm(Evaluation):
        def evaluate(self, trainer, model, data, stage):
            return {f"{stage}/norm_of_W": model.network.W.detach().norm().item()}

    module = model(phases=[Phase(10)])
    run = trainer([Norm()])
    run.fit(module, datamodule=moons())
    assert run.callback_metrics["val/norm_of_W"].item() == pytest.approx(module.network.W.detach().norm().item())


def test_the_kernel_error_of_several_readouts_is_logged_in_one_pass(monkeypatch):
    passes = []
    compute = KernelNRMSE.compute
    monkeypatch.setattr(KernelNRMSE, "compute", lambda self: passes.append(self) or compute(self))
    module, data = model(), moons()
    run = trainer([KernelErrorEvaluation(["least_squares", "neural", "nystroem"], max_points=50)])
    scores = run.validate(module, datamodule=data, verbose=False)[0]
    assert len(passes) == 1
    x = data.train_points.data[random_subset(200, 50)]
    for name, readout in (("", "neural"), ("_nystroem", "nystroem"), ("_least_squares", "least_squares")):
        y = read_out(module.network, readout, x, sample=data.train_points.data)
        assert scores[f"val/kernel_nrmse{name}"] == pytest.approx(kernel_nrmse(module.kernel, x, y).item(), rel=1e-6)
