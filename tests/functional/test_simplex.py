"""The quadratic programme over the simplex, against a search and against the conditions of a minimum."""

import pytest
import torch

from fl_lightning.functional.simplex import semidefinite, simplex_minimum


def random_gram(m, rank, seed):
    x = torch.randn(m, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x @ x.T


@pytest.mark.parametrize("m", [1, 2, 5, 20, 100])
@pytest.mark.parametrize("shift", [0.0, 1e-6, 0.3])
def test_the_conditions_of_a_minimum_hold(m, shift):
    for seed in range(5):
        matrix = random_gram(m, max(1, m // 2), seed) + shift * torch.eye(m)
        weights = simplex_minimum(matrix)
        slope = matrix @ weights
        value = weights @ matrix @ weights
        scale = matrix.diagonal().max()
        assert (weights >= 0).all()
        assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
        assert (slope >= value - 1e-9 * scale).all()  # no vertex is a way down
        torch.testing.assert_close(
            slope[weights > 0], value.expand(int((weights > 0).sum())), rtol=0, atol=1e-9 * scale
        )


def test_scale_does_not_matter_and_a_zero_matrix_has_a_minimum():
    matrix = random_gram(6, 6, 0)
    for factor in (1e-12, 1e12):
        torch.testing.assert_close(simplex_minimum(factor * matrix), simplex_minimum(matrix))
    assert simplex_minimum(torch.zeros(3, 3).double()).sum() == 1


def check_minimum(matrix, weights):
    """The conditions of a minimum, each row's to the precision that its own length allows."""
    slope = matrix @ weights
    value = weights @ matrix @ weights
    tolerance = 1e-7 * (matrix.diagonal() * value).sqrt()
    assert (slope >= value - tolerance).all()
    used = weights > 0
    assert ((slope - value).abs() <= tolerance)[used].all()


@pytest.mark.parametrize("m", [5, 20])
def test_rows_of_a_far_larger_scale_cost_no_digits(m):
    rows = torch.randn(m, 3 * m, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[m // 2 :] *= 1e9
    matrix = rows @ rows.T
    check_minimum(matrix, simplex_minimum(matrix))


def test_a_hundred_clients_of_very_different_features_have_a_minimum():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = 1e4 * torch.rand(100, 1, dtype=torch.float64, generator=generator) ** 4
        h = lengths * torch.randn(100, 50, dtype=torch.float64, generator=generator)
        variances = torch.rand(100, dtype=torch.float64, generator=generator) * torch.logspace(-6, 0, 100).double()
        away = h[0] - h
        matrix = variances.diag() + away @ away.T
        check_minimum(matrix, simplex_minimum(matrix))


def test_equal_models_share_a_minimum():
    matrix = torch.ones(4, 4).double() + torch.diag(torch.tensor([0.1, 0.1, 0.2, 0.4]).double())
    torch.testing.assert_close(simplex_minimum(matrix), torch.tensor([4, 4, 2, 1]).double() / 11)


def test_what_is_not_finite_has_no_minimum():
    assert simplex_minimum(torch.full((2, 2), torch.nan).double()) is None
    assert semidefinite(torch.full((2, 2), torch.nan).double(), 0.01).isnan().all()


def test_only_an_indefinite_matrix_loses_eigenvalues():
    definite = torch.diag(torch.tensor([0.001, 1.0]).double())
    assert torch.equal(semidefinite(definite, 0.01), definite)
    indefinite = torch.diag(torch.tensor([-0.001, 0.001, 1.0]).double())
    torch.testing.assert_close(semidefinite(indefinite, 0.01), torch.diag(torch.tensor([0.0, 0.0, 1.0]).double()))
