"""A loop in plain PyTorch: `hpo run --study examples/digits_torch.py --trials 20`."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import hpo


@hpo.study(
    space={
        "lr": hpo.Float(1e-4, 1e-1, log=True),
        "width": hpo.Int(8, 128, powers_of_two=True),
        "dropout": hpo.Float(0.0, 0.5),
    },
    constants={"batch_size": 64},
    maximize="val/accuracy",
    num_epochs=9,
)
def digits(trial):
    p = trial.params
    torch.manual_seed(trial.seed)
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    x, x_val, y, y_val = x[:1200], x[1200:], y[:1200], y[1200:]
    model = nn.Sequential(nn.Linear(64, p.width), nn.ReLU(), nn.Dropout(p.dropout), nn.Linear(p.width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=p.lr)
    if saved := trial.resume():
        state = torch.load(saved / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(trial.epoch + 1, trial.num_epochs + 1):
        torch.manual_seed(trial.seed + epoch)  # a function of the epoch: there is no random state to save
        model.train()
        for rows in torch.randperm(len(x)).split(p.batch_size):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x_val).argmax(1) == y_val).float().mean().item()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, trial.directory / "state.pt")
        trial.save(trial.directory / "state.pt")
        if trial.report(epoch, {"val/accuracy": accuracy, "train/loss": loss.item()}):
            return


if __name__ == "__main__":
    print(hpo.run(digits, trials=20).best)
