"""The linear probe and KMeans against scikit-learn and problems with known solutions."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression

from ksm_lightning.evaluation.clustering import kmeans, matched_accuracy
from ksm_lightning.evaluation.linear_probe import PENALTIES, draw_labelled, fit_softmax, linear_probe


def problem(seeds=2, samples=400, features=30, classes=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0.5, -1.5, features)
    x = 3 + torch.randn(seeds, samples, features, generator=g) * spread
    truth = torch.randn(features, classes, generator=g)
    noise = torch.randn(seeds, samples, classes, generator=g)
    return x, ((x - 3) @ truth + noise).argmax(-1)


def loss(W, b, x, labels, penalty):
    logits = x.double() @ W.double() + b.double()
    squares = W.double().square().sum() + b.double().square().sum()
    return (torch.nn.functional.cross_entropy(logits, labels) + penalty / 2 * squares).item()


def scikit_learn(x, labels, penalty, tolerance=1e-10):
    """The minimiser by Newton's method, with a penalised bias."""
    model = LogisticRegression(
        C=1 / (penalty * len(x)), solver="newton-cholesky", tol=tolerance, fit_intercept=False, max_iter=1000
    )
    model.fit(torch.cat([x, torch.ones(len(x), 1)], dim=1).double().numpy(), labels.numpy())
    weights = torch.tensor(model.coef_.T)
    return weights[:-1], weights[-1]


@pytest.mark.parametrize("samples", [400, 20])
def test_every_problem_of_the_grid_reaches_the_minimum_of_scikit_learn(samples):
    x, labels = problem(samples=samples)
    found = fit_softmax(x, labels, PENALTIES, 5, tolerance=1e-8)
    for s in range(2):
        for index, penalty in enumerate(PENALTIES):
            if len(labels[s].unique()) < 5:
                continue
            least = loss(*scikit_learn(x[s], labels[s], penalty), x[s], labels[s], penalty)
            mine = loss(found.W[s, index], found.b[s, index], x[s], labels[s], penalty)
            # If the classes are separable, the loss is small and limited by float32.
            assert mine <= least * (1 + 1e-4) + 5e-6


def test_float64_reaches_the_minimiser():
    x, labels = problem(seeds=1)
    found = fit_softmax(x.double(), labels, [0.01], 5, tolerance=1e-14)
    W, b = scikit_learn(x[0], labels[0], 0.01, 1e-12)
    np.testing.assert_allclose(found.W[0, 0].numpy(), W.numpy(), atol=1e-5)
    np.testing.assert_allclose(found.b[0, 0].numpy(), b.numpy(), atol=1e-5)


@pytest.mark.parametrize("samples", [400, 20])
def test_an_unpenalised_bias_and_weights_reach_the_minimiser_of_scikit_learn(samples):
    """Also with fewer samples than features, and with rows of weight 0."""
    x, labels = problem(seeds=2, samples=samples, classes=3)
    x, weights = x.double(), torch.rand(2, samples, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights[:, :3] = 0
    found = fit_softmax(x, labels, [0.01, 0.3], 3, weights=weights, is_bias_penalised=False, tolerance=1e-14)
    for s in range(2):
        for index, penalty in enumerate((0.01, 0.3)):
            model = LogisticRegression(C=1 / (penalty * float(weights[s].sum())), solver="newton-cholesky", tol=1e-12)
            model.fit(x[s].numpy(), labels[s].numpy(), sample_weight=weights[s].numpy())
            np.testing.assert_allclose(found.W[s, index].T.numpy(), model.coef_, rtol=0, atol=1e-5)
            bias = found.b[s, index] - found.b[s, index].mean()  # a common shift of all classes is free
            np.testing.assert_allclose(bias.numpy(), model.intercept_ - model.intercept_.mean(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_bias_penalised", [True, False])
def test_a_weight_of_2_is_a_repeated_sample(is_bias_penalised):
    x, labels = problem(seeds=1, samples=60, classes=3)
    x, weights = x.double(), torch.ones(1, 60).index_fill_(1, torch.arange(20), 2.0)
    options = {"is_bias_penalised": is_bias_penalised, "tolerance": 1e-15}
    weighted = fit_softmax(x, labels, [0.01], 3, weights=weights, **options)
    twice = torch.cat([x, x[:, :20]], dim=1), torch.cat([labels, labels[:, :20]], dim=1)
    repeated = fit_softmax(*twice, [0.01], 3, **options)
    torch.testing.assert_close(weighted.W, repeated.W, rtol=0, atol=1e-6)
    torch.testing.assert_close(weighted.b, repeated.b, rtol=0, atol=1e-6)


def test_seeds_and_penalties_are_independent():
    x, labels = problem(seeds=3)
    together = fit_softmax(x, labels, [1e-3, 1e-1], 5)
    alone = fit_softmax(x[1:2], labels[1:2], [1e-1], 5)
    torch.testing.assert_close(together.W[1, 1], alone.W[0, 0], rtol=1e-2, atol=1e-3)


def test_a_rotation_and_a_zero_feature_do_not_change_the_solution():
    x, labels = problem(seeds=1)
    plain = fit_softmax(x, labels, [1e-2], 5, tolerance=1e-8)
    rotation = torch.linalg.qr(torch.randn(31, 31, generator=torch.Generator().manual_seed(0)))[0]
    turned = torch.cat([x, torch.zeros(1, 400, 1)], dim=2) @ rotation
    found = fit_softmax(turned, labels, [1e-2], 5, tolerance=1e-8)
    expected = torch.cat([plain.W[0, 0], torch.zeros(1, 5)])
    torch.testing.assert_close(rotation @ found.W[0, 0], expected, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(found.b, plain.b, rtol=1e-2, atol=2e-3)


def test_one_label_per_class_is_enough_for_separate_classes():
    """An unpenalised bias would fit the few labels without using the features."""
    g = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(5, 40, generator=g)
    labels = torch.arange(500) % 5
    x = centres[labels] * torch.rand(500, 1, generator=g).add(0.5) + torch.randn(500, 40, generator=g)
    found = linear_probe((x, labels), (x, labels), (x, labels), per_class=1)
    assert found.accuracy > 0.95


def test_it_works_under_inference_mode_and_does_not_change_the_global_random_state():
    x, labels = problem(seeds=1)
    expected = linear_probe(*[(x[0], labels[0])] * 3, per_class=10)
    before = torch.get_rng_state()
    with torch.inference_mode():
        found = linear_probe(*[(x[0], labels[0])] * 3, per_class=10)
    assert torch.equal(torch.get_rng_state(), before)
    assert found == expected


def test_four_points_placed_by_hand():
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [5.0, 0.0], [5.0, 1.0]])
    labels = torch.tensor([3, 3, 9, 9])  # labels may be any numbers
    far = (torch.tensor([[-1.0, 0.5], [6.0, 0.5]]), torch.tensor([3, 9]))
    found = linear_probe((x, labels), far, (far[0], torch.tensor([3, 3])), per_class=2, seeds=[0])
    assert found.validation_accuracy == 1
    assert found.train_accuracy == 1
    assert found.accuracy == 0.5


def test_the_selection_of_the_paper_reports_the_validation_accuracy():
    x, labels = problem(seeds=2)
    train, validation, test = (x[0], labels[0]), (x[1][:200], labels[1][:200]), (x[1][200:], labels[1][200:])
    paper = linear_probe(train, validation, selection="paper", per_class=20)
    selected = linear_probe(train, validation, test, per_class=20)
    assert paper.accuracy == paper.validation_accuracy == selected.validation_accuracy
    assert paper.penalty == selected.penalty
    assert selected.accuracy != selected.validation_accuracy


def test_only_the_used_samples_are_encoded():
    x, labels = problem(seeds=1)
    seen = []

    def encode(part):
        seen.append(len(part))
        return part * 2

    linear_probe((x[0], labels[0]), (x[0][:50], labels[0][:50]), (x[0][:60], labels[0][:60]), per_class=4, seeds=[0, 1],
                 encode=encode)  # fmt: skip
    assert sorted(seen) == [40, 50, 60]


def test_draws_are_balanced_random_and_reproducible():
    labels = torch.randint(0, 4, (1000,))
    first = draw_labelled(labels, 7, seed=1)
    assert torch.bincount(labels[first]).tolist() == [7, 7, 7, 7]
    assert len(first.unique()) == 28
    assert torch.equal(first, draw_labelled(labels, 7, seed=1))
    assert not torch.equal(first, draw_labelled(labels, 7, seed=2))
    assert len(draw_labelled(labels, 0, seed=1)) == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "random"}, "`selection` must be"),
        ({"test": None}, "needs test samples"),
        ({"per_class": 1000}, r"`per_class` is 1000, but class \d has only \d+ labelled samples"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    x, labels = problem(seeds=1)
    part = (x[0], labels[0])
    with pytest.raises(ValueError, match=message):
        linear_probe(part, part, options.pop("test", part), **options)


# ---------------------------------------------------------------------- KMeans


def test_kmeans_reaches_the_energy_of_scikit_learn():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=g) + 4 * torch.randn(6, 4, generator=g)[torch.arange(300) % 6]
    ours = kmeans(x, 6, starts=50)
    reference = KMeans(6, n_init=50, random_state=0).fit(x.numpy())
    assert ours.energy == pytest.approx(reference.inertia_, rel=1e-3)
    assert matched_accuracy(ours.assignment, torch.tensor(reference.labels_).long()) > 0.99


def test_kmeans_of_separate_clusters_is_exact_far_from_the_origin():
    centres = 1000 + torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    labels = torch.arange(90) % 3
    x = centres[labels] + 0.1 * torch.randn(90, 2)
    found = kmeans(x, 3, starts=20)
    assert matched_accuracy(found.assignment, labels) == 1
    expected = torch.stack([x[labels == i].mean(0) for i in range(3)])
    assert torch.cdist(found.centres, expected).min(1).values.max() < 1e-2


def test_one_cluster_per_sample_has_energy_0():
    x = torch.randn(5, 2)
    assert kmeans(x, 5).energy == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="between 1 and 5 clusters"):
        kmeans(x, 6)


def test_the_best_assignment_of_clusters_to_labels_counts():
    assert matched_accuracy(torch.tensor([2, 2, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 2])) == 1.0
    assert matched_accuracy(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 2])) == 0.5


def test_a_check_can_give_up_the_probe_and_the_clusters():
    x, labels, calls = torch.randn(200, 5), torch.arange(200) % 4, []

    def check():
        calls.append(1)
        if len(calls) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        linear_probe((x, labels), (x, labels), (x, labels), per_class=20, check=check)
    assert len(calls) == 2, "at the start, and after a few iterations"
    calls.clear()
    with pytest.raises(TimeoutError):
        kmeans(x, 4, starts=2, check=check)
