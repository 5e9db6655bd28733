"""A generative adversarial net, trained by hand: two toggled optimizers, pictures for loggers, an example input."""

import torch
import torchvision
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

NUM_SHOWN = 6


def painter(num_draws: int, num_pixels: int) -> nn.Sequential:
    """Return a net that turns draws into pixels in (−1, 1)."""
    return nn.Sequential(
        nn.Linear(num_draws, 16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Linear(16, 32),
        nn.BatchNorm1d(32, eps=0.8),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Linear(32, num_pixels),
        nn.Tanh(),
    )


def critic(num_pixels: int) -> nn.Sequential:
    """Return a net that says how probable it is that a picture is real."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_pixels, 32),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Linear(32, 1),
        nn.Sigmoid(),
    )


class GAN(LightningModule):
    """Learns pictures of one channel.

    Args:
        size: Height and width of a picture.
        num_draws: Number of draws behind a picture.
        lr: Learning rate of both nets.
    """

    def __init__(self, size: int, num_draws: int = 8, lr: float = 0.0002) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = painter(num_draws, size**2)
        self.discriminator = critic(size**2)
        self.shown_draws = torch.randn(NUM_SHOWN, num_draws)
        self.example_input_array = torch.zeros(2, num_draws)

    def forward(self, draws: Tensor) -> Tensor:
        size = self.hparams.size
        return self.generator(draws).unflatten(1, (1, size, size))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        real, _ = batch
        of_generator, of_discriminator = self.optimizers()
        draws = torch.randn(len(real), self.hparams.num_draws).to(real)

        self.toggle_optimizer(of_generator)
        self.painted = self(draws)
        self.show("train/generated", self.painted[:NUM_SHOWN])
        loss = self.error(self.painted, is_real=True)
        self.descend("generator_loss", loss, of_generator)
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        on_painted = self.error(self(draws).detach(), is_real=False)
        loss = (self.error(real, is_real=True) + on_painted) / 2
        self.descend("discriminator_loss", loss, of_discriminator)
        self.untoggle_optimizer(of_discriminator)

    def error(self, pictures: Tensor, *, is_real: bool) -> Tensor:
        """Return the discriminator's loss if all pictures are real, or painted."""
        said = self.discriminator(pictures)
        return binary_cross_entropy(said, torch.full_like(said, float(is_real)))

    def descend(self, name: str, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Log a loss and take a step."""
        self.log(name, loss, prog_bar=True)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def show(self, name: str, pictures: Tensor) -> None:
        """Hand pictures to the loggers."""
        grid = torchvision.utils.make_grid(pictures)
        for logger in self.loggers:
            logger.experiment.add_image(name, grid, self.current_epoch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        weight = self.generator[0].weight
        self.show("validation/generated", self(self.shown_draws.to(weight)))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        nets = (self.generator, self.discriminator)
        return [torch.optim.Adam(net.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999)) for net in nets]
