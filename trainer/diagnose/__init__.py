"""Looking into a training run: what a user asks when a number is not what it should be. `fit` needs none of it but
`nonfinite`."""
