"""Signals: handlers that only set a flag, runs that end where nothing is half done, and signals that are never lost."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from helpers.commands import HALF_MOONS
from helpers.paths import ROOT
from helpers.processes import PATIENCE
from helpers.runs import fit, model
from ksm_lightning.callbacks import Figures, run_figures
from ksm_lightning.cli import main
from ksm_lightning.data.datamodule import training_inputs
from ksm_lightning.evaluation import kernel_error, linear_probe
from ksm_lightning.files import draft_of
from ksm_lightning.learning import SingleProcess
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import KSMNetwork
from ksm_lightning.runs.checkpoint import read_checkpoint
from ksm_lightning.runs.logger import RunLogger
from ksm_lightning.runs.stop import StopFlag, handle_by, stopping_by

pytestmark = pytest.mark.usefixtures("in_tmp_path")

CPU = torch.device("cpu")


# ---------------------------------------------------------------------- the handler


def test_the_handler_only_sets_the_flag_even_while_the_thread_holds_a_lock(tmp_path):
    """The lock is that of the queue of TensorBoard's writer: taking it again in the handler would block for ever."""
    flag, logger = StopFlag(), TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    queue = logger.experiment._get_file_writer().event_writer._async_writer._byte_queue
    with stopping_by(flag):
        with queue.mutex:
            signal.raise_signal(signal.SIGTERM)
        assert flag == StopFlag(signal.SIGTERM, None, is_owned=True)
    logger.finalize("success")


def test_a_signal_in_a_finaliser_is_not_lost():
    class Signals:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    flag = StopFlag()
    with stopping_by(flag):
        Signals()
        gc.collect()
    assert flag.number == signal.SIGINT
    flag.agree(SingleProcess(), CPU)
    with pytest.raises(KeyboardInterrupt):
        flag.leave_if_agreed()


def test_a_third_ctrl_c_ends_a_process_that_reads_no_flag():
    flag = StopFlag()
    before = signal.getsignal(signal.SIGINT)
    with stopping_by(flag):
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) not in (before, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons, if there are other threads
def test_a_worker_process_ignores_ctrl_c_and_obeys_sigterm():
    """It inherits the handler. The run still needs its batches after Ctrl-C, and a DataLoader ends it by SIGTERM."""
    flag = StopFlag()
    with stopping_by(flag):
        ready, child_ready = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(target=_wait, args=(child_ready,))
        worker.start()
        assert ready.recv() == "ready"
        os.kill(worker.pid, signal.SIGINT)
        assert ready.poll(0.2) is False
        assert worker.is_alive()
        worker.terminate()
        worker.join(PATIENCE)
    assert worker.exitcode == -signal.SIGTERM
    assert flag.number is None


def _wait(pipe) -> None:
    pipe.send("ready")
    threading.Event().wait(PATIENCE)


def test_another_thread_leaves_the_handlers_alone():
    found = []
    thread = threading.Thread(target=lambda: found.append(handle_by(StopFlag())))
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    thread.join()
    assert found == [{}]
    assert signal.getsignal(signal.SIGINT) is before


class _TwoRanks(SingleProcess):
    """Collectives in which another process adds the same value at every sum."""

    size = 2

    def __init__(self, other: list[int]):
        self.other = torch.tensor(other)

    def sum(self, value):
        return value + self.other


@pytest.mark.parametrize(
    ("own", "other", "agreed"),
    [
        (None, [0, 0, 0], None),
        (None, [0, 1, 0], signal.SIGTERM),
        (signal.SIGTERM, [0, 0, 0], signal.SIGTERM),
        (signal.SIGINT, [0, 1, 1], signal.SIGINT),
    ],
)
def test_processes_agree_on_one_signal(own, other, agreed):
    flag = StopFlag(own)
    assert flag.agree(_TwoRanks(other), CPU) is (agreed is not None)
    assert flag.agreed == agreed
    assert flag.number == own
    assert flag.requeues == (other[2] == 1)


# ---------------------------------------------------------------------- a run of `ksm fit`

UPDATES = 24
RUN = [
    "--config", HALF_MOONS, "--data.num_points=200", "--data.updates_per_epoch=8", "--data.eval_batch_size=50",
    "--model.num_neurons=4", f"--model.updates={UPDATES}", "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false", "--figures.num_neurons=1", "--figures.every_n_updates=12",
    "--kernel_error.min_updates_between=0", "--probe.min_updates_between=0", "--probe.labels_per_class=20",
]  # fmt: skip
LAST = Path("runs/half_moons/version_0/checkpoints/last.ckpt")


def stopped(capsys, *options: str) -> tuple[int, str]:
    """Exit code and last line on standard error of a run that a signal ends."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", *RUN, *options])
    return stop.value.code, capsys.readouterr().err.strip().splitlines()[-1]


def signal_at(monkeypatch, owner, name: str, number: int, call: int = 1) -> list[bool]:
    """Raise a signal in the middle of the n-th call of a function; returns a list of whether each call has returned."""
    original, returned = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        returned.append(False)
        place = len(returned)
        if place == call:
            signal.raise_signal(number)
        result = original(*args, **kwargs)
        returned[place - 1] = True
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return returned


def is_whole(path: Path, update: int) -> None:
    assert read_checkpoint(path)["global_step"] == update
    assert [found.name for found in path.parent.iterdir()] == ["last.ckpt"]


def continued() -> str:
    return f"continue from the last checkpoint with --ckpt_path={LAST}."


@pytest.mark.parametrize(
    ("owner", "name", "number", "call", "update"),
    [
        (KSMNetwork, "energy_of", signal.SIGINT, 3, 8),  # in a validation batch; the guard makes the first call
        (kernel_error, "_sum_of_squares", signal.SIGTERM, 11, 4),  # in an evaluation between validations
        (kernel_error, "_sum_of_squares", signal.SIGTERM, 17, 8),  # in a tile of the kernel error
        (linear_probe, "_two_loops", signal.SIGTERM, 1, 8),  # in a linear probe
        (run_figures, "portrait_arrays", signal.SIGINT, 1, 12),  # in a figure
    ],
    ids=["validation", "milestone", "tile", "probe", "figure"],
)
def test_a_signal_ends_the_run_at_the_next_point_with_a_checkpoint(
    owner, name, number, call, update, capsys, monkeypatch
):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    returned = signal_at(monkeypatch, owner, name, number, call)
    code, line = stopped(capsys)
    assert code == 128 + number
    assert returned[call - 1], "the handler raised an exception"
    assert line == f"ksm: stopped at update {update}; {continued()}"
    is_whole(LAST, update)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("place", ["lock", "finaliser"])
def test_a_signal_at_the_worst_moment_of_logging_neither_hangs_nor_is_lost(place, capsys, monkeypatch):
    """While the thread holds the lock of TensorBoard's queue, and in a finaliser, which ignores exceptions."""
    original, returned = RunLogger.log_metrics, []

    class Signals:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def log_metrics(self, metrics, step=None):
        if not returned and "val/energy" in metrics:
            with self.experiment._get_file_writer().event_writer._async_writer._byte_queue.mutex:
                signal.raise_signal(signal.SIGINT) if place == "lock" else Signals()
            returned.append(step)
        original(self, metrics, step)

    monkeypatch.setattr(RunLogger, "log_metrics", log_metrics)
    code, line = stopped(capsys)
    assert (code, line) == (130, f"ksm: stopped at update 8; {continued()}")
    assert returned == [8]
    is_whole(LAST, 8)


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_a_signal_during_consolidation_loses_nothing(bound, capsys, monkeypatch):
    """The run stops between two blocks of data, and continues to the weights of an undisturbed one, bit for bit."""

    def inputs(trainer):
        for index, block in enumerate(training_inputs(trainer)):
            if index == 1:
                signal.raise_signal(signal.SIGTERM)
            yield block

    options = [f"--model.bound={bound}", "--trainer.limit_val_batches=0"]
    monkeypatch.setattr(Figures, "_draw", lambda *args, **kwargs: None)  # slow, and not needed here
    with monkeypatch.context() as patch:
        patch.setattr("ksm_lightning.module.training_inputs", inputs)
        code, line = stopped(capsys, *options)
    assert code == 143
    assert line == f"ksm: stopped at update {UPDATES}, the last one, before L was consolidated; {continued()}"
    is_whole(LAST, UPDATES)
    main(["fit", *RUN, *options, "--trainer.logger.name=rest", f"--ckpt_path={LAST}"])
    main(["fit", *RUN, *options, "--trainer.logger.name=whole"])
    paths = [Path(f"runs/{name}/version_0/checkpoints/last.ckpt") for name in ("rest", "whole")]
    found, expected = (read_checkpoint(path)["state_dict"] for path in paths)
    assert not torch.equal(read_checkpoint(LAST)["state_dict"]["network.L"], expected["network.L"])
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with pytest.raises(SystemExit):
        main(["fit", *RUN, f"--ckpt_path={paths[0]}"])
    assert "No update is left to do" in capsys.readouterr().err


def test_a_signal_after_the_last_update_is_reported_and_leaves_a_complete_run(capsys, monkeypatch):
    signal_at(monkeypatch, run_figures, "write_png", signal.SIGTERM, call=2)
    with pytest.raises(SystemExit) as stop:
        main(["fit", *RUN, "--figures.every_n_updates=0"])
    printed = capsys.readouterr()
    assert stop.value.code == 143
    assert f"Trained for {UPDATES} updates" in printed.out
    assert "Final kernel NRMSE" in printed.out
    expected = f"ksm: stopped after update {UPDATES}, the last one; figures that were not drawn yet are missing."
    assert printed.err.strip().splitlines()[-1] == expected
    is_whole(LAST, UPDATES)
    assert len(list(LAST.parents[1].glob("figures/*.png"))) == 2


def test_a_signal_before_the_first_update_leaves_no_folder(capsys, monkeypatch):
    signal_at(monkeypatch, RunLogger, "log_hyperparams", signal.SIGINT)
    assert stopped(capsys) == (130, "ksm: stopped at update 0, before the first checkpoint.")
    assert list(Path("runs").rglob("*")) == [Path("runs/half_moons")]


def test_evaluations_and_predictions_end_between_two_batches(capsys, monkeypatch):
    main(["fit", *RUN, "--trainer.max_steps=4", "--trainer.limit_val_batches=0"])
    capsys.readouterr()
    batches = []

    def then_signal(original):
        def step(self, *args):
            batches.append(1)
            result = original(self, *args)
            signal.raise_signal(signal.SIGTERM)
            return result

        return step

    for name in ("predict_step", "_evaluation_step"):
        monkeypatch.setattr(KernelSimilarityMatching, name, then_signal(getattr(KernelSimilarityMatching, name)))
    data = [option for option in RUN if option.startswith("--data") or option in RUN[:2]]
    for command in ("validate", "test", "predict"):
        batches.clear()
        more = ["--features.path=y.npy"] if command == "predict" else []
        with pytest.raises(SystemExit) as stop:
            main([command, *data, "--trainer.enable_progress_bar=false", f"--ckpt_path={LAST}", *more])
        assert stop.value.code == 143
        assert capsys.readouterr().err.strip().splitlines()[-1] == "ksm: stopped."
        assert len(batches) == 2, "the second batch starts, and finds the flag"
        assert [path.name for path in Path().iterdir()] == ["runs"]


# ---------------------------------------------------------------------- without the command line


def test_a_trainer_of_a_script_ends_by_the_flag_and_gets_its_handlers_back(monkeypatch):
    returned = signal_at(monkeypatch, KSMNetwork, "energy_of", signal.SIGINT)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    module = model()
    with pytest.raises(SystemExit):
        fit(module)
    assert returned[0], "the handler raised an exception"
    assert module.run_state.stop.agreed == signal.SIGINT
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert fit(model()).global_step == 10


def test_a_signal_at_the_end_of_a_script_reaches_it(monkeypatch):
    monkeypatch.setattr("ksm_lightning.module.log_final_scores", lambda *args: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        fit(model())
    assert type(stop.value).__name__ == "SIGTERMException"


# ---------------------------------------------------------------------- the commands without a Trainer


def test_sigterm_ends_a_report_and_removes_what_is_half_written(monkeypatch):
    def work(run: str) -> None:
        with draft_of(Path("page.html")) as draft:
            draft.write_text("half")
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("ksm_lightning.cli.report.report", work)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        main(["report", "runs"])
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(Path().iterdir()) == []


# ---------------------------------------------------------------------- a small part of scripts/stress/signals.py


def test_a_few_signals_at_random_moments_of_one_and_two_processes():
    """In another process, because a fork needs a parent without threads."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import signals\n"
        "rows = [job | signals.work(job) for job in signals.jobs(6, 2, {1: 0.8, 2: 0.8})]\n"
        "print([(row['ranks'], signals.outcome(row), row['drafts']) for row in rows])\n"
    )
    folder = ROOT / "scripts" / "stress"
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    outcomes = re.findall(r"\((\d), '([^']+)', (\[.*?\])\)", result.stdout.splitlines()[-1])
    assert len(outcomes) == 6
    good = {"the run had ended", "before the first checkpoint", "after the last update",
            "with a checkpoint of the update"}  # fmt: skip
    assert {kind for _, kind, _ in outcomes} <= good
    assert {drafts for _, _, drafts in outcomes} == {"[]"}
