"""Kernel error, figures and progress, as a trainer drives them."""

import io
import re

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_module import model, moons

import references
from ksm_lightning.callbacks import (
    Figures,
    KernelErrorEvaluation,
    KMeansProbe,
    LinearProbe,
    UpdateCheckpoint,
    UpdateProgressBar,
)
from ksm_lightning.callbacks.run_figures import figure_data
from ksm_lightning.data import ArrayDataModule, DigitsDataModule
from ksm_lightning.evaluation.clustering import kmeans, matched_accuracy
from ksm_lightning.evaluation.linear_probe import linear_probe
from ksm_lightning.figures import panels as figures
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.runs.logger import RunLogger


def trainer(callbacks, logger=False, **options) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=any(isinstance(callback, UpdateProgressBar) for callback in callbacks),
        max_epochs=-1,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        **options,
    )


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


def test_the_probe_reads_what_the_functions_read():
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


def test_validate_repeats_what_fit_logged_last():
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


def test_evaluations_wait_but_never_miss_the_end():
    module, steps = model(phases=[Phase(70)]), []

    class Spy(KernelErrorEvaluation):
        def evaluate(self, trainer, *args):
            steps.append(trainer.global_step)
            return super().evaluate(trainer, *args)

    trainer([Spy(min_updates_between=25)]).fit(module, datamodule=moons(updates_per_epoch=10))
    assert steps == [10, 40, 70]


def test_data_without_labels_is_passed_over(tmp_path):
    np.save(tmp_path / "x.npy", np.random.RandomState(0).randn(40, 2))
    run = trainer([KernelErrorEvaluation(["neural"]), LinearProbe(), KMeansProbe()])
    run.fit(model(phases=[Phase(10)]), datamodule=ArrayDataModule(str(tmp_path / "x.npy")))
    assert {name for name in run.callback_metrics if "/" in name} == {"train/energy", "val/energy", "val/kernel_nrmse"}


def test_small_classes_give_as_many_labels_as_they_have(tmp_path):
    rng = np.random.RandomState(0)
    np.savez(tmp_path / "x.npz", x=rng.randn(60, 2), label=np.repeat([1, 5, 9], [40, 12, 8]))
    run = trainer([LinearProbe(labels_per_class=100)])
    run.fit(model(phases=[Phase(10)]), datamodule=ArrayDataModule(str(tmp_path / "x.npz"), key="x", labels="label"))
    assert 0 < run.callback_metrics["val/probe_accuracy"] <= 1


def test_evaluations_say_what_they_need():
    loader = torch.utils.data.DataLoader(torch.zeros(8, 2))
    with pytest.raises(
        ValueError, match="KernelErrorEvaluation evaluates KernelSimilarityMatching on a datamodule of ksm_lightning"
    ):
        trainer([KernelErrorEvaluation()]).fit(model(), loader)


def test_final_scores_stand_beside_the_hyper_parameters(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run", default_hp_metric=False)
    run = trainer([KernelErrorEvaluation(), LinearProbe(labels_per_class=20)], logger)
    run.fit(model(phases=[Phase(30)]), datamodule=moons())
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    for name, metric in (("final/kernel_nrmse", "val/kernel_nrmse"), ("final/probe_accuracy", "test/probe_accuracy")):
        (scalar,) = events.Scalars(name)
        assert scalar.value == pytest.approx(run.callback_metrics[metric].item(), rel=1e-6)
    assert any("hparams" in tag for tag in events.summary_metadata)


def test_test_error_is_that_of_the_test_points():
    module, data = model(), moons()
    x = data.test_points.data
    expected = references.nrmse(references.gram("gaussian", {"sigma": 0.3}, x, x), module(x))
    result = trainer([KernelErrorEvaluation()]).test(module, datamodule=data, verbose=False)[0]
    assert result["test/kernel_nrmse"] == pytest.approx(expected, rel=1e-5)


def test_figures_go_to_files_and_to_tensorboard(tmp_path):
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
        assert picture.std() > 0.05  # something is drawn
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0, "histograms": 0}).Reload()
    assert [image.step for image in events.Images("figures/overview")] == [20, 40, 50]
    assert [image.step for image in events.Images("figures/energy")] == [50]
    assert [event.step for event in events.Histograms("responses")] == [20, 40, 50]
    assert [event.step for event in events.Scalars("train/energy")] == list(range(5, 51, 5))


def test_a_figure_that_fails_does_not_cost_the_run(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise np.linalg.LinAlgError("no picture today")

    monkeypatch.setattr("ksm_lightning.callbacks.run_figures.figure_data", fail)
    run = trainer([Figures()], TensorBoardLogger(tmp_path, name="", version="run"))
    with pytest.warns(UserWarning, match="The figures could not be drawn: no picture today"):
        run.fit(model(phases=[Phase(10)]), datamodule=moons())
    assert run.global_step == 10


def test_image_data_gets_a_grid_of_features(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    module = model(in_features=64, kernel="power_cosine", kernel_params={"alpha": 3}, phases=[Phase(5)])
    trainer([Figures(max_points=100)], logger).fit(module, datamodule=DigitsDataModule(seed=0))
    assert (tmp_path / "run" / "figures" / "weights.png").is_file()
    assert (tmp_path / "run" / "figures" / "linearised.png").is_file()


def test_the_energy_curve_survives_a_restart():
    callback = Figures()
    callback._updates, callback._energies = [5, 10], [1.0, 0.5]
    restored = Figures()
    restored.load_state_dict(callback.state_dict())
    assert (restored._updates, restored._energies) == ([5, 10], [1.0, 0.5])


def test_figure_data_is_what_it_says():
    module, x = model(kernel="linear", kernel_params={}), moons().train_points.data[:100]
    computed = figure_data(module, x, pairs=100)
    y = module(x)
    assert (y.mean(0) < 0).any()
    assert (computed["y"].mean(0) >= 0).all()  # signs aligned, as the kernel is odd
    np.testing.assert_allclose(computed["f"], x @ x.mT, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(computed["output"], y @ y.mT, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(computed["output_spectrum"][:2], np.linalg.eigvalsh(y @ y.mT)[::-1][:2], rtol=1e-4)
    np.testing.assert_allclose(computed["input_spectrum"][:2], np.linalg.eigvalsh(x @ x.mT)[::-1][:2], rtol=1e-4)
    assert computed["nrmse"] == pytest.approx(references.nrmse(x @ x.mT, y), rel=1e-4)


def test_tuning_colours_are_grey_red_and_blue():
    red, grey, blue = (np.array(figures.TUNING(value)[:3]) for value in (1.0, 0.5, 0.0))
    assert red[0] > 2 * red[2]
    assert blue[2] > 2 * blue[0]
    assert np.ptp(grey) < 0.02


def test_neurons_shown_differ_and_are_alive():
    W = np.array([[0.0, 0.0], [0.1, 0.0], [5.0, 0.0], [0.0, 9.0]])
    y = np.array([[1.0, 0.9, 0.8, 1e-6]] * 3)
    assert figures.choose_neurons(W, y, 2) == [0, 2]
    assert sorted(figures.choose_neurons(W, y, 9)) == [0, 1, 2, 3]


def test_points_of_many_dimensions_are_projected_on_their_principal_plane():
    rng = np.random.RandomState(0)
    x = rng.randn(100, 5) * [1, 5, 1, 3, 1]
    plane = figures.Plane(x)
    assert plane.is_projected
    np.testing.assert_allclose(plane(x).var(0), np.linalg.eigvalsh(np.cov(x.T, bias=True))[::-1][:2], rtol=1e-9)
    assert figures.Plane(x[:1])(x[:3]).shape == (3, 2)
    line = figures.Plane(np.arange(5.0)[:, None])
    assert line(np.arange(5.0)[:, None]).shape == (5, 2)


def test_the_bar_counts_updates_and_shows_the_energy(monkeypatch):
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


def test_runs_get_folders_of_their_own(tmp_path):
    loggers = [RunLogger(str(tmp_path), "x") for _ in range(3)]
    assert [logger.version for logger in loggers] == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["version_0", "version_1", "version_2"]
    assert loggers[0].version == 0


def test_a_race_for_a_number_gives_each_run_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(RunLogger, "_get_next_version", lambda self: next(guesses))
    guesses = iter([0, 0, 1])  # the second run was told 0 before the first had made its folder
    assert [RunLogger(str(tmp_path), "x").version for _ in range(2)] == [0, 1]


def test_a_named_run_is_never_overwritten(tmp_path):
    assert RunLogger(str(tmp_path), "x", version="mine").version == "mine"
    with pytest.raises(FileExistsError, match="exists already"):
        _ = RunLogger(str(tmp_path), "x", version="mine").version


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
def test_impossible_callbacks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_panel_draws_without_a_neuron_that_answers():
    """A dead network is what one wants to look at."""
    x, y = np.random.RandomState(0).randn(20, 2), np.zeros((20, 3))
    plane = figures.Plane(x)
    figures.draw(lambda axes: figures.tuning_panel(axes, x, y[:, 0], 0, plane))
    figures.draw(lambda axes: figures.energy_panel(axes, [], []))
    figures.draw(lambda axes: figures.similarity_panel(axes, x @ x.T, y @ y.T, 1.0))
    assert torch.equal(torch.tensor(figures.choose_neurons(x[:3], y, 2)), torch.tensor([0, 1]))
