"""A program of the standard library that prints an epoch and two values in lines of their own."""

import random
import sys
import time

lr, number, epochs = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(number)
loss = 1.0
for epoch in range(1, epochs + 1):
    time.sleep(0.05)
    loss = loss * (1 - lr) + 0.01 * rng.random()
    print(f"epoch {epoch}", flush=True)
    print(f"loss={loss!r}", flush=True)
    print(f"accuracy={1 - loss!r}", flush=True)
