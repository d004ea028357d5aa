"""Small parts that everything above uses: epochs, seeds, threads, devices, failpoints, names in a configuration."""
