"""Steps of local optimizers: every bit as torch's, its hooks included, whether or not anybody listens."""

import itertools
from contextlib import ExitStack

import pytest
import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fl_lightning.client.optimizers import LocalOptimizer
from fl_lightning.client.unwrapped_step import unwrapped_step

OTHERS = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
SHAPES = [(10,), (4, 3), (40, 24, 5, 5), (600, 77)]
"""Vector, matrix, one laid out as channels last, one with a gradient that lies otherwise."""


class Own(optim.SGD):
    """SGD with a step of its own."""

    def step(self, closure=None):
        self.taken = True
        return super().step(closure)


def local(optimizer):
    counted = []
    return LocalOptimizer(optimizer, None, lambda *_: counted.append(1), [optimizer]), counted


def draw(shape, g, dtype):
    """Numbers laid out as the parameter of this shape."""
    drawn = torch.randn(shape, generator=g).to(dtype)
    return drawn.to(memory_format=torch.channels_last) if len(shape) == 4 else drawn


def stepped(make, step, shapes=SHAPES, dtype=torch.float32, steps=4):
    """Parameters and states after steps of which each leaves out some gradients."""
    g = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(draw(shape, g, dtype)) for shape in shapes]
    optimizer = make(params)
    take = step(optimizer)
    for i in range(steps):
        for j, p in enumerate(params):
            grad = draw(p.shape, g, dtype)
            p.grad = None if (i + j) % 3 == 2 else grad.t().contiguous().t() if p.shape == (600, 77) and i < 2 else grad
        take()
    states = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return params + [value for value in states if torch.is_tensor(value)]


def torchs(optimizer):
    return optimizer.step


def ours(optimizer):
    return local(optimizer)[0].step


def assert_same_bits(make, **settings):
    one = stepped(make, torchs, **settings)
    other = stepped(make, ours, **settings)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("name", OTHERS)
def test_torch_s_optimizers_step_as_by_themselves(name):
    assert_same_bits(lambda params: getattr(optim, name)(params, lr=0.01), shapes=SHAPES[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
def test_sgd_gives_every_bit_of_its_own_step(dtype, momentum, weight_decay):
    for dampening, nesterov, maximize in itertools.product([0.0, 0.1], [False, True], [False, True]):
        if not nesterov or (momentum and not dampening):
            rules = {"dampening": dampening, "nesterov": nesterov, "maximize": maximize, "weight_decay": weight_decay}
            assert_same_bits(lambda params, rules=rules: optim.SGD(params, 0.03, momentum, **rules), dtype=dtype)


@pytest.mark.parametrize(
    "chosen", [{"foreach": True}, {"fused": True}, {"foreach": False}, {"lr": torch.tensor(0.03)}], ids=str
)
def test_what_the_user_chose_of_sgd_is_done(chosen):
    """`fused` of whole parameters, with all gradients: torch's kernel takes nothing else."""
    assert_same_bits(lambda params: optim.SGD(params, **{"lr": 0.03, **chosen}), shapes=SHAPES[:2])


def test_sparse_gradients_and_half_types():
    def step_with(take):
        table = torch.nn.Parameter(torch.arange(128.0).view(-1, 2))
        optimizer = optim.SGD([table], 0.1)
        table.grad = torch.sparse_coo_tensor([[1, 5]], torch.ones(2, 2), table.shape)
        take(optimizer)()
        return table

    assert torch.equal(step_with(torchs), step_with(ours))
    assert_same_bits(lambda params: optim.SGD(params, 0.1, momentum=0.9), dtype=torch.bfloat16)


@pytest.mark.parametrize("where", ["before", "after", "before any", "after any"])
def test_whoever_listens_to_a_step_is_called(where):
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([p], 1.0)
    wrapped, counted = local(optimizer)
    register = {
        "before": optimizer.register_step_pre_hook,
        "after": optimizer.register_step_post_hook,
        "before any": register_optimizer_step_pre_hook,
        "after any": register_optimizer_step_post_hook,
    }[where]
    heard = []
    with ExitStack() as stack:
        p.grad = torch.ones(3)
        wrapped.step()
        handle = register(lambda *_: heard.append(p.tolist()))
        stack.callback(handle.remove)
        wrapped.step()
    wrapped.step()
    assert heard == [[-1.0] * 3 if where.startswith("before") else [-2.0] * 3]
    assert p.tolist() == [-3.0] * 3
    assert len(counted) == 3


def test_a_graph_whose_weights_were_stepped_meanwhile_is_stale():
    for momentum in (0.0, 0.9):
        p = torch.nn.Parameter(torch.randn(256, 256))
        wrapped, _ = local(optim.SGD([p], 0.1, momentum=momentum))
        (p**2).sum().backward()
        late = (p**2).sum()
        wrapped.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


def test_a_class_that_an_optimizer_is_given_later_steps_it():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    optimizer = optim.SGD([p], 1.0)
    wrapped, _ = local(optimizer)
    optimizer.__class__ = Own
    wrapped.step()
    assert optimizer.taken


def test_a_step_of_one_s_own_is_taken():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    own = Own([p], 1.0)
    local(own)[0].step()
    assert own.taken
    assert p.tolist() == [-1.0] * 3

    replaced = optim.SGD([p], 1.0)
    wrapped, counted = local(replaced)
    replaced.step = lambda: counted.append("mine")
    wrapped.step()
    assert counted == ["mine"]
    assert p.tolist() == [-1.0] * 3


def test_a_step_that_somebody_wrapped_is_not_unwrapped(monkeypatch):
    assert unwrapped_step(optim.Adam.step).__qualname__ == "Adam.step"
    own = optim.Adam.step

    def wrapper(self, closure=None):
        return own(self, closure)

    wrapper.__wrapped__ = own
    wrapper.hooked = True
    monkeypatch.setattr(optim.Adam, "step", wrapper)
    assert unwrapped_step(optim.Adam.step) is None
