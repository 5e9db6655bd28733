"""App of the nodes: an epoch of SGD on a perceptron, written with Flower and torch alone."""

import importlib

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

app = ClientApp()


def net() -> torch.nn.Module:
    """Make the net."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one epoch, and send the weights."""
    if context.run_config["torchvision"]:
        importlib.import_module("torchvision")
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load_digits(return_X_y=True)
    inputs = torch.tensor(x[:700] / 16, dtype=torch.float32)
    labels = torch.tensor(y[:700])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for places in torch.randperm(len(labels)).split(32):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs[places]), labels[places])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(labels), "loss": float(loss)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
