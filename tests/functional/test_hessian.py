import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn import functional as F

from fl_lightning.functional.density import angle_density, kernel_density
from fl_lightning.functional.hessian import hessian_product, leading_eigenvectors


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    params = {name: value.detach() for name, value in net.named_parameters()}
    x = torch.randn(10, 3, dtype=torch.float64)
    y = torch.arange(10) % 2

    def loss(p, batch):
        return F.cross_entropy(functional_call(net, p, (batch[0],)), batch[1])

    whole = hessian(lambda v: loss(named(v, params), (x, y)))(torch.cat([v.flatten() for v in params.values()]))
    return loss, params, (x, y), whole


def named(vector, params):
    parts = torch.split(vector, [value.numel() for value in params.values()])
    return {name: part.view_as(value) for (name, value), part in zip(params.items(), parts, strict=True)}


def test_the_product_in_batches_is_that_of_the_whole_hessian(problem):
    loss, params, (x, y), whole = problem
    vector = torch.randn(len(whole), dtype=torch.float64)
    batches = [((x[:3], y[:3]), 3), ((x[3:], y[3:]), 7)]
    product = hessian_product(loss, params, batches, named(vector, params))
    torch.testing.assert_close(torch.cat([v.flatten() for v in product.values()]), whole @ vector)
    assert not any(value.requires_grad for value in params.values())


def test_power_iteration_finds_the_eigenvectors_of_largest_magnitude(problem):
    whole = problem[3]
    expected = torch.linalg.eigh(whole)
    order = expected.eigenvalues.abs().argsort(descending=True)[:2]
    draw = torch.Generator().manual_seed(1)
    values, vectors = leading_eigenvectors(lambda v: whole @ v, len(whole), 2, 5000, 1e-14, draw)
    torch.testing.assert_close(values, expected.eigenvalues[order], rtol=1e-6, atol=0)
    for vector, column in zip(vectors, expected.eigenvectors[:, order].T, strict=True):
        assert abs(vector @ column) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(2, dtype=torch.float64))


def test_a_flat_loss_has_no_sharp_direction():
    values, vectors = leading_eigenvectors(torch.zeros_like, 5)
    assert values.tolist() == [0, 0]
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(2, dtype=torch.float64))


def test_a_loss_that_is_not_finite_in_some_entries_has_no_eigenvalue():
    diagonal = torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan]).double()
    values, vectors = leading_eigenvectors(lambda v: diagonal * v, 5)
    assert values.isnan().all()
    assert vectors.isnan().all()


def test_densities_integrate_to_1_and_agree_with_scikit_learn():
    from sklearn.neighbors import KernelDensity

    known = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    line = torch.linspace(-8, 8, 161, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    density = kernel_density(grid, known, width=0.4)
    assert float(density.sum() * 0.1**2) == pytest.approx(1, abs=1e-6)
    theirs = KernelDensity(bandwidth=0.4).fit(known.numpy()).score_samples(grid[:50].numpy())
    torch.testing.assert_close(density[:50].log(), torch.from_numpy(theirs))
    angles = torch.linspace(-torch.pi, torch.pi, 1001, dtype=torch.float64)[:-1]
    for width in (0.1, 1.0):
        circle = angle_density(angles, torch.atan2(known[:, 1], known[:, 0]), width)
        assert float(circle.mean() * 2 * torch.pi) == pytest.approx(1, abs=1e-5)
        there, behind = angle_density(torch.tensor([-torch.pi, torch.pi]).double(), known[:, 0], width).tolist()
        assert there == pytest.approx(behind, rel=1e-5)
