"""Softmax regression on handwritten digits: a script with arguments. By itself: python digits.py --lr 0.1"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

from hpo.client import trial

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--weight-decay", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images, classes = images / 16, np.eye(10)[labels]
train, val = slice(0, 1200), slice(1200, None)
weights, done = np.zeros((64, 10)), 0
if saved := trial.resume():
    weights, done = np.load(saved / "weights.npy"), trial.epoch


def softmax(x):
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


for epoch in range(done + 1, args.epochs + 1):
    order = np.random.default_rng([args.seed, epoch]).permutation(1200)
    for rows in np.split(order, range(args.batch_size, 1200, args.batch_size)):
        x, y = images[train][rows], classes[train][rows]
        weights -= args.lr * (x.T @ (softmax(x @ weights) - y) / len(rows) + args.weight_decay * weights)
    accuracy = np.mean((images[val] @ weights).argmax(axis=1) == labels[val])
    np.save(trial.directory / "weights.npy", weights)
    trial.save(trial.directory / "weights.npy")
    if trial.report(epoch, {"val/accuracy": accuracy}):
        break
